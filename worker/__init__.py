"""The worker process: requests in from NATS, forward passes on one MLX device, tokens and records out."""
