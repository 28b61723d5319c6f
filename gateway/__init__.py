"""HTTP for agents and tools: OpenAI's API in front of durable sessions. Imports only `protocol`."""
