"""OpenAI's chat completions, completions and embeddings, translated to and from the worker's protocol."""
