"""Copies MLX caches into plain bytes and rebuilds them. The only part of `cache` that uses MLX."""
