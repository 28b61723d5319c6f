"""Translates OpenAI's chat completions, completions and embeddings to and from the worker's protocol."""
