"""The demo and the benchmarks: they drive a worker from outside, through `protocol` alone."""
