"""The command line's work on a cache directory. Blocking; uses no running store."""
