"""The log as its operator sees it: what is in it, replays of it, and copies. Reaches NATS by the client."""
