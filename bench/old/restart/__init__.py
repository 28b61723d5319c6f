"""`turnkeep bench restart`: the first token of the next turn, after all that a session can live through."""
