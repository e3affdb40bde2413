"""The same work on kvtier and on LMCache 0.5.6, and end to end in a real vLLM: see ``__main__.py``."""
