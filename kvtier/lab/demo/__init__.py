"""``kvtier demo``: a real vLLM server completes a long prompt four times, and prefills it once.

With ``--disaggregated``, one vLLM server prefills and another one decodes, behind a proxy.

Nothing else in kvtier depends on this package.
"""
