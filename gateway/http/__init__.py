"""The gateway's HTTP application: paths, bodies, answers whole or as events, and the server that runs it."""
