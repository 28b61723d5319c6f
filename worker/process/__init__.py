"""What the process is: settings, keys, its directory and lock, tasks and clock."""
