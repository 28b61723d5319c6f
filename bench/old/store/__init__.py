"""`turnkeep bench store`: what the snapshot cache does without a worker."""
