"""The device thread and its scheduling: the next step, the sessions whose KV stays there, and memory."""
