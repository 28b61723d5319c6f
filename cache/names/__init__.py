"""What KV is called: by its tokens, its tenant and the model, and what a snapshot of it holds. Pure."""
