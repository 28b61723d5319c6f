"""What the command line does with a cache directory. Blocking; no running store takes part in it."""
