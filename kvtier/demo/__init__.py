"""``kvtier demo``: a real vLLM server answers a long prompt four times, and prefills it once.

Nothing here is used by anything else in kvtier.
"""
