"""Inspects and changes a cache directory for the command line, without a running worker's store. Blocking."""
