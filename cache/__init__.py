"""KV state on SSD: named by content, checked before use, bounded in bytes.

`store.Store` is the only face of a running cache; `survey`, `archive` and `pruning` serve the command line.
Knows nothing of NATS, of sessions, or of the worker.
"""
