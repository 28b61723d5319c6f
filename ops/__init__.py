"""What surrounds running workers: the demo today. Talks to them through `protocol` alone."""
