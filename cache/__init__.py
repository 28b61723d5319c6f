"""KV state on SSD: named by content, checked before use, bounded in bytes.

A worker sees `names`, `kv`, and of a running cache `store` alone; behind that are `disk` and `index`. `admin`
serves the command line. Knows nothing of NATS, of sessions, or of the worker.
"""
