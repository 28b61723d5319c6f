"""The benchmarks: they drive a worker from outside, by `protocol`; only `programs` imports the worker."""
