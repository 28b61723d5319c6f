"""What surrounds running workers: metrics for people and programs. Imports `protocol` alone."""
