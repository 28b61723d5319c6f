"""`turnkeep bench many`: far more sessions than fit in memory."""
