"""One step of the device: a token of each running answer, and pieces of prompts."""
