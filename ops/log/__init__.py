"""Reads, replays and copies the log for its operator. Reaches NATS through the client."""
