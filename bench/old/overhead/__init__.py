"""`turnkeep bench overhead`: the same prompts through a worker, and in process without one."""
