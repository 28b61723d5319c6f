"""Turns messages into tokens, and tokens into text."""
