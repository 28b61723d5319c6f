"""`turnkeep bench replay`: sessions that a worker has recorded, played again."""
