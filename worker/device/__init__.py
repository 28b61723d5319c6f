"""Runs turns on the device thread: chooses each step, gets the KV that it starts from, and runs it."""
