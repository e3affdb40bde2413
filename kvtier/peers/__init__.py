"""Peer-to-peer tier: instances read from, and push to, each other's tiers."""
