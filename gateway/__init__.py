"""Serves OpenAI's, Anthropic's and Ollama's HTTP APIs, as a client of the worker. Imports only `protocol`."""
