"""Reads, replays and copies the log, for operators. Reaches NATS through the client."""
