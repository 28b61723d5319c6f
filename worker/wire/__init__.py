"""All use of NATS: server process, connection, streams, requests, chunks and session logs."""
