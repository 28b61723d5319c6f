"""A disk cache of KV snapshots, which are named by their content, verified before use, limited in bytes.

A worker imports `names`, `kv`, and `store`, the only interface to a running cache; `disk` and `index` are
internal. `admin` serves the command line. The package knows nothing of NATS, sessions or the worker.
"""
