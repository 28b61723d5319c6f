"""One step of the device: answers and prompts in one pass."""
