"""The device thread: which step runs next, which sessions keep KV on the device, and its memory."""
