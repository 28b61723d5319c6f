"""OpenAI's chat completions, completions and embeddings: dialects over the same form as the others."""
