"""Replays recorded requests through the classes that serve, on a virtual clock and without bytes."""
