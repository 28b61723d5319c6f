"""The same model without Turnkeep: mlx-lm in a process of its own, driven through its standard input.

`engine` is that program, and alone imports MLX; `process` starts it and talks to it in `messages`.
"""
