"""Monitors workers, and has the commands on the log. Imports `protocol`, and `cache.names` for tokens."""
