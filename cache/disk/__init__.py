"""Files: the directory, a snapshot's format, the SQLite catalog, and the threads that write and read."""
