"""Measuring what is configured beside the limits of its medium: ``kvtier bench``, and what benchmarks share.

::

    errors.py timing.py                  what everything here speaks of
    sides.py                             one way to a medium; a kvtier backend is one
    memory.py raw_files.py raw_resp.py   the limits: the same bytes by hand
    libraries.py                         the limits: the pool's own client library
    raw_sockets.py bare_nixl.py          the limits of transports
    transports.py transport_process.py   two processes, a transport and its limit between them
    chunks.py calls.py limits.py rows.py what a tier is measured with
    tiers.py links.py                    one tier; one transport
    run.py report.py plot.py             what the command is made of
"""
