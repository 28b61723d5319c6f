"""Drives a worker from outside, through `protocol` alone: the demo, and measurements."""
