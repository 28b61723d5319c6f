"""Monitoring of running workers, and commands on the log. Imports `protocol`, and `cache` for tokens."""
