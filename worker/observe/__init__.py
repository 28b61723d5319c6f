"""Observability of the worker: counters, metrics, traces, health, logs."""
