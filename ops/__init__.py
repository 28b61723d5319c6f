"""What surrounds running workers: metrics for people and programs, and the log. Imports `protocol` alone."""
