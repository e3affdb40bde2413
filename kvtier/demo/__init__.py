"""``kvtier demo``: a real vLLM server answers a long prompt four times, and prefills it once.

With ``--disaggregated`` one vLLM server computes prompts and another one answers, behind a proxy.

Nothing here is used by anything else in kvtier.
"""
