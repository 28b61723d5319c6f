"""What surrounds running workers, through `protocol` alone. Empty so far."""
