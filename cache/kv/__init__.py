"""Copies MLX caches to plain bytes, and rebuilds caches from them. The only part of `cache` that uses MLX."""
