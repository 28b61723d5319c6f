"""The index of stored snapshots, and the disk limits. Event loop only; never waits for the disk."""
