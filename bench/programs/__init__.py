"""Programs that a bench runs as child processes; only these import MLX, mlx-lm or the worker's code."""
