"""Finding, converting and loading models."""
