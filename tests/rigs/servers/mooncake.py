"""A real Mooncake pool: a master, and one client that provides memory."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from kvtier.memory.keys import ChunkKey
from kvtier.testing.servers import TIMEOUT_SECONDS, Server, free_port

HOST = "127.0.0.1"
MASTER, CLIENT = "mooncake_master", "mooncake_client"


class MooncakeServer(Server):
    """``mooncake_master``, and a ``mooncake_client`` whose ``segment`` is all of the pool's memory.

    Both are started, paused and killed together. ``segment`` is a size in Mooncake's syntax; ``None``: start
    the master only.
    """

    type: ClassVar[str] = "mooncake"

    def __init__(self, folder: Path, *, segment: str | None = "512 MB") -> None:
        super().__init__(folder)
        self.prefix = "kvtier:"
        """Prefix of chunk names."""
        self._segment = segment
        self._master_port, self._admin_port, self._client_port = free_port(), free_port(), free_port()

    @classmethod
    def missing(cls) -> str | None:
        """See :meth:`Server.missing`."""
        if all(_program(name).exists() for name in (MASTER, CLIENT)):
            return None
        return "mooncake_master is not installed: pip install 'kvtier[mooncake]'"

    @property
    def master(self) -> str:
        """Host and port of the master."""
        return f"{HOST}:{self._master_port}"

    def tier(self) -> dict[str, Any]:
        """Return the settings of a tier that uses the pool and provides no memory itself."""
        return {"type": self.type, "master": self.master, "prefix": self.prefix}

    def corrupt(self, key: ChunkKey) -> bool:
        """Corrupt a byte in the memory of the client, which its parent process may access."""
        _, client = self._processes
        (replica,) = json.loads(self._query_master(f"query_key?key={self.prefix}{key.hex()}"))["data"]
        with Path(f"/proc/{client.pid}/mem").open("r+b", buffering=0) as memory:
            middle = replica["buffer_address_"] + replica["size_"] // 2
            memory.seek(middle)
            (byte,) = memory.read(1)
            memory.seek(middle)
            memory.write(bytes([byte ^ 0x10]))
        return True

    def pause_client(self) -> None:
        """Send SIGSTOP to the client only: the master answers, the memory does not."""
        self._processes[1].send_signal(signal.SIGSTOP)

    def _launch(self) -> None:
        self._spawn(
            [
                str(_program(MASTER)),
                f"--rpc_address={HOST}",
                f"--rpc_port={self._master_port}",
                f"--metrics_host={HOST}",
                f"--metrics_port={self._admin_port}",
            ]
        )
        # The client does not start without a master.
        self._wait_until(lambda: bool(self._query_master("health")))
        if self._segment is not None:
            self._spawn(
                [
                    str(_program(CLIENT)),
                    f"--host={HOST}",
                    f"--port={self._client_port}",
                    f"--master_server_address={self.master}",
                    "--metadata_server=P2PHANDSHAKE",
                    f"--global_segment_size={self._segment}",
                ]
            )

    def _answers(self) -> bool:
        return self._segment is None or bool(self._query_master("get_all_segments"))

    def _query_master(self, path: str) -> bytes:
        """Query the master's HTTP admin server. Empty if it does not answer."""
        try:
            with urlopen(f"http://{HOST}:{self._admin_port}/{path}", timeout=TIMEOUT_SECONDS) as response:
                body: bytes = response.read()
                return body
        except HTTPError as error:
            error.close()
            return b""
        except URLError:
            return b""


def _program(name: str) -> Path:
    """Return the path of a program in the client library's package; a nonexistent path if that is missing."""
    package = importlib.util.find_spec("mooncake")
    folders = (package.submodule_search_locations if package else None) or []
    return next((Path(folder) / name for folder in folders), Path("/nonexistent"))
