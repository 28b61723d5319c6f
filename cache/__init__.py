"""KV state on SSD: named by content, checked before use, bounded in bytes.

`store.Store` is the only face. Knows nothing of NATS, of sessions, or of the worker.
"""
