"""Tests of ``kvtier.sockets``."""
