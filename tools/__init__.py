"""Programs for developers of Stagemesh; nothing here is installed."""
