"""Ollama's API: translates its requests into `ClientTurn`s, and results into its answers."""
