"""Models on disk: fetching the demo model, and finding what MODEL names. Torch-free,
apart from the conversion, which runs in a process of its own."""
