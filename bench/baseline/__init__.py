"""The same model without Turnkeep: mlx-lm in a process of its own, driven through its standard input.

`python -m bench.baseline` is that program (`__main__`, `engine`); `process` starts it for a bench and talks
to it in `messages`. Only the program imports MLX.
"""
