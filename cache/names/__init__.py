"""How KV is named (by tokens, tenant and model), and what a KV snapshot consists of. Pure."""
