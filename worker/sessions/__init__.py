"""Sessions: they read their logs, carry out requests in order, and commit the results."""
