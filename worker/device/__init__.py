"""The device: which step runs next, whose KV stays there, and whether it fits into memory."""
