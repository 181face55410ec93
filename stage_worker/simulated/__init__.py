"""A device that waits instead of computing; see docs/simulated-device.md."""
