"""``kvtier bench``: compare tiers and transports with the limit of their medium. ``benchmarks/`` uses it too.

::

    sides.py                             interface of one way to a medium, and the kvtier backend as one
    memory.py raw_files.py raw_resp.py   limits: minimal code that moves the same bytes
    libraries.py                         limits: the pool's own client library
    raw_sockets.py bare_nixl.py          limits of transports
    mirror.py                            the memory of the other process, and processes that map it
    errors.py timing.py chunks.py calls.py
    turns.py rows.py                     interleave the sides; results
    tiers.py limits.py transports.py     measure one tier; one transport
    run.py report.py plot.py             event loop, table and plot of the command
"""
