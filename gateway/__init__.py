"""The HTTP gateway: APIs of OpenAI, Anthropic and Ollama over durable sessions. Imports only `protocol`."""
