"""Hosts on one machine, joined by a network whose delay, loss, rate and cuts a test sets while it runs.

::

    if reason := Network.missing():
        pytest.skip(reason)
    with Network(hosts=2) as network:
        near, far = network.hosts
        server = far.popen([sys.executable, "-m", "http.server", "--bind", far.address])
        network.delay(0.02)
        network.cut()
        network.heal()
"""

from __future__ import annotations

from kvtier.testing.network.network import Counts, Host, Network, NetworkError

__all__ = ["Counts", "Host", "Network", "NetworkError"]
