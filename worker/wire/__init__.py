"""Everything that crosses NATS: server process, connection, streams, requests, chunks and session logs."""
