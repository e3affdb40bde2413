"""What other capacities and eviction policies would hit, estimated from a sample while a cache serves."""
