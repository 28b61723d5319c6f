"""Sessions: the order of their requests, their logs, and how a request is carried out."""
