"""The index of what is stored, and its limits. Belongs to the event loop; never waits for the disk."""
