"""Copies MLX caches to plain bytes, and rebuilds caches from them. Only this part of `cache` uses MLX."""
