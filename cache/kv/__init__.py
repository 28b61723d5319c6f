"""MLX caches taken apart into plain bytes, and made again of them. The only part of `cache` that uses MLX."""
