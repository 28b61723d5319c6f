"""`turnkeep bench peers`: the same conversations with Turnkeep and with OpenAI-compatible servers."""
