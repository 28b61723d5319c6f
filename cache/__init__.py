"""A disk cache of KV: snapshots are named by their content, verified before use, limited in bytes.

A worker imports `names`, `kv`, and `store`, the only interface to a running cache; `disk` and `index` are
internal. `admin` serves the command line. Knows nothing of NATS, sessions or the worker.
"""
