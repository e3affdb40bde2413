"""``kvtier bench``: compare tiers and transports with the limit of their medium. ``benchmarks/`` uses it too.

::

    sides.py                             one way to a medium, kvtier's backend as one; what it moves
    limits.py raw_resp.py                limits of tiers: minimal code that moves the same bytes
    raw_sockets.py bare_nixl.py          limits of transports
    mirror.py                            the memory of the other process, and processes that map it
    turns.py rows.py                     interleave the sides; results
    tiers.py transports.py               measure one tier; one transport
    run.py report.py                     event loop, table and plot of the command
"""
