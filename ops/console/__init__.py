"""`turnkeep console`: shows workers and sessions on a web page."""
