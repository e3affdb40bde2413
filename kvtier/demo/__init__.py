"""``kvtier demo``: a real vLLM server answers a long prompt four times, and prefills it once.

With ``--disaggregated`` one vLLM server computes prompts, another one answers, and a proxy is in front of both.

Nothing here is used by anything else in kvtier.
"""
