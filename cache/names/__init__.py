"""How KV is named, by tokens, tenant and model, and what a snapshot of KV holds. Pure."""
