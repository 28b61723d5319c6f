"""NATS for several tenants: a program that makes an account for each tenant."""
