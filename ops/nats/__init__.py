"""NATS for several tenants: an account for each of them, and the program that makes the accounts."""
