"""Measures a worker from outside, through `protocol` alone."""
