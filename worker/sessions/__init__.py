"""Sessions: their order, their log as it is read, and what a request does to them."""
