"""Tiers: backends with circuit breaker, checksums, deadlines and cost estimates; and the router."""
