"""Virtual hosts on one machine, on a network with delay, loss, rate and partitions set by the test.

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

from tests.rigs.network.network import Counts, Host, Network, NetworkError

__all__ = ["Counts", "Host", "Network", "NetworkError"]
