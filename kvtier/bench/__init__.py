"""``kvtier bench``: compare tiers and transports with the limit of their medium. ``benchmarks/`` uses it too.

::

    errors.py timing.py                  errors; interleaved runs, ratios, percentiles
    sides.py                             interface of one way to a medium, and the kvtier backend as one
    memory.py raw_files.py raw_resp.py   limits: minimal code that moves the same bytes
    libraries.py                         limits: the pool's own client library
    raw_sockets.py bare_nixl.py          limits of transports
    transports.py transport_process.py   a transport and its limit between two processes
    chunks.py calls.py limits.py rows.py helpers to measure a tier
    tiers.py links.py                    measure one tier; one transport
    run.py report.py plot.py             event loop, table and plot of the command
"""
