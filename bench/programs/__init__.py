"""Programs that a bench starts, in processes of their own: they alone import MLX, mlx-lm or the worker."""
