"""Runs turns on the device: chooses each step, and which sessions keep KV in the device's memory."""
