"""The index of stored snapshots, and its limits. Belongs to the event loop; never waits for the disk."""
