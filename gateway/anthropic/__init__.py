"""Anthropic's API: a dialect over the same form as the others."""
