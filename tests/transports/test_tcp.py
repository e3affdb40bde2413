"""The transport conformance suite over ``tcp``, plain and with TLS."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from kvtier.testing.transport import TransportConformance
from kvtier.testing.transport_sides import Certificate
from kvtier.transports.tcp import TcpTransport
from tests.rigs.certificates import make_certificate


class TestTcp(TransportConformance):
    transport = TcpTransport
    settings: ClassVar = {"type": "tcp"}


class TestTcpOverTLS(TransportConformance):
    transport = TcpTransport
    settings: ClassVar = {"type": "tcp", "connections": 2}

    def certificate(self, path: Path) -> Certificate:
        files = make_certificate(path)
        return Certificate(str(files.certificate), str(files.key))
