"""Monitoring of running workers, and commands on the log. Imports only `protocol`."""
