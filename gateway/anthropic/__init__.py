"""Anthropic's API: translates its requests into `Turn`s, and results into its answers."""
