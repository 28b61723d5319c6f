"""HTTP for agents: OpenAI's and Anthropic's APIs in front of durable sessions. Imports only `protocol`."""
