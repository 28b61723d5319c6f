"""`turnkeep bench load`: many sessions at once."""
