"""What can be seen of the worker: counters, metrics, traces, health, logs."""
