"""The names of KV (by tokens, tenant and model), and the parts of a KV snapshot. Pure."""
