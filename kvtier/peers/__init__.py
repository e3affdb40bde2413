"""Instances that serve their tiers to each other."""
