"""The transport ``tcp``: several TCP connections to each peer, plain or TLS."""

from kvtier.transports.tcp.settings import TcpSettings
from kvtier.transports.tcp.transport import TcpTransport

__all__ = ["TcpSettings", "TcpTransport"]
