"""`turnkeep bench pressure`: a random load around the memory limit."""
