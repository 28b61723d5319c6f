"""Sessions: each reads its log, carries out its requests in order, and commits their results."""
