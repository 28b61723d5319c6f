"""Configures NATS servers for several tenants: an account for each tenant, and clusters."""
