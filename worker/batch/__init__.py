"""Runs one step on the device: the next token of each running answer, and pieces of prompts."""
