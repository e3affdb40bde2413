"""The transport conformance suite, over NIXL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from kvtier.testing.transport import TransportConformance
from kvtier.transports.nixl.transport import NixlTransport

pytest.importorskip("nixl_cu13")


@pytest.mark.slow  # Each test starts processes that load NIXL.
class TestNixl(TransportConformance):
    transport = NixlTransport
    settings: ClassVar[Mapping[str, Any]] = {"type": "nixl", "ucx": {"TLS": "tcp,self"}}
    # Connections only exchange the addresses of agents.
    over_connections = False
