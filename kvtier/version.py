"""The version of kvtier, in the lowest layer: every package may import it."""

__version__ = "0.2.0"
