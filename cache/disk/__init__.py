"""The cache on disk: its directory, the file format, the SQLite catalog, the writer and reader threads."""
