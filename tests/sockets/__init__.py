"""Sockets."""
