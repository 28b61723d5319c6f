"""`turnkeep console`: workers and sessions on a web page."""
