"""`turnkeep bench session`: one session, many turns."""
