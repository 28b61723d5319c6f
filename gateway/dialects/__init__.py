"""The APIs that the gateway speaks: each folder reads requests and writes answers as one of them does."""
