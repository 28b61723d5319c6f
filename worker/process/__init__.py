"""The process around the worker's parts: settings, keys, data directory and lock, tasks and clock."""
