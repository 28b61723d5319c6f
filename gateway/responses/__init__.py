"""OpenAI's Responses: a dialect over the same form as the others."""
