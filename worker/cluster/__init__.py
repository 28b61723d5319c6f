"""Several workers of one prefix: which of them serves a session, and how another takes it over."""
