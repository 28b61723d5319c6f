"""HTTP APIs of OpenAI, Anthropic and Ollama over durable sessions. Imports no other folder but `protocol`."""
