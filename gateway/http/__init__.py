"""The gateway's HTTP side: routes, request bodies, whole and streamed answers, and the server."""
