"""The benches as they were, each until it is ported; everything in here goes."""
