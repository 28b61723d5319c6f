"""Commands of operators on the log: they read, replay, copy and check it. Reaches NATS through the client."""
