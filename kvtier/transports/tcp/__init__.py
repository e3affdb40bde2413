"""The transport ``tcp``: several TCP connections to each peer, plain or TLS."""

from kvtier.transports.tcp.transport import TcpSettings, TcpTransport

__all__ = ["TcpSettings", "TcpTransport"]
