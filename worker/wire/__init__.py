"""Everything that crosses NATS: the server, the connection, streams, requests, chunks and the log."""
