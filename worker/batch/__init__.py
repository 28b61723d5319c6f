"""Runs steps on the device: a step decodes a token of each running answer and prefills pieces of prompts."""
