"""Comparison of kvtier with LMCache 0.5.6, alone and end to end in a real vLLM: see ``__main__.py``."""
