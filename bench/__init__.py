"""The benchmarks: they send requests to a worker as any client; only `programs` imports the worker's code."""
