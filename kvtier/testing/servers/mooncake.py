"""A real Mooncake pool: its master, and one client that gives memory."""

from __future__ import annotations

import importlib.util
import json
import signal
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from kvtier.keys import ChunkKey
from kvtier.testing.servers.base import PATIENCE_SECONDS, Server, free_port

HOST = "127.0.0.1"
MASTER, CLIENT = "mooncake_master", "mooncake_client"


class MooncakeServer(Server):
    """``mooncake_master``, and a ``mooncake_client`` whose ``segment`` is all the memory that the pool has.

    Both are started, paused and killed together. ``segment`` is written as Mooncake writes sizes; ``None``:
    there is a master alone.
    """

    type: ClassVar[str] = "mooncake"

    def __init__(self, folder: Path, *, segment: str | None = "512 MB") -> None:
        super().__init__(folder)
        self.prefix = "kvtier:"
        """What the names of chunks begin with."""
        self._segment = segment
        self._master_port, self._admin_port, self._client_port = free_port(), free_port(), free_port()

    @classmethod
    def missing(cls) -> str | None:
        """See :meth:`Server.missing`."""
        if all(_program(name).exists() for name in (MASTER, CLIENT)):
            return None
        return "there is no mooncake_master: pip install 'kvtier[mooncake]'"

    @property
    def master(self) -> str:
        """Host and port of the master."""
        return f"{HOST}:{self._master_port}"

    def tier(self) -> dict[str, Any]:
        """The settings of a tier that uses the pool and gives no memory itself."""
        return {"type": self.type, "master": self.master, "prefix": self.prefix}

    def corrupt(self, key: ChunkKey) -> bool:
        """Flip a byte in the memory of the client that gave it, as the parent of a process may."""
        _, client = self._processes
        (replica,) = json.loads(self._ask_master(f"query_key?key={self.prefix}{key.hex()}"))["data"]
        with Path(f"/proc/{client.pid}/mem").open("r+b", buffering=0) as memory:
            middle = replica["buffer_address_"] + replica["size_"] // 2
            memory.seek(middle)
            (byte,) = memory.read(1)
            memory.seek(middle)
            memory.write(bytes([byte ^ 0x10]))
        return True

    def pause_client(self) -> None:
        """SIGSTOP for the client alone: the master answers, the memory does not."""
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
        # Without a master, the client does not start.
        self._wait_until(lambda: bool(self._ask_master("health")), "did not answer")
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
        return self._segment is None or bool(self._ask_master("get_all_segments"))

    def _ask_master(self, question: str) -> bytes:
        """What the master's web server for operators answers; nothing where it does not."""
        try:
            with urlopen(f"http://{HOST}:{self._admin_port}/{question}", timeout=PATIENCE_SECONDS) as answer:
                said: bytes = answer.read()
                return said
        except HTTPError as error:
            error.close()
            return b""
        except URLError:
            return b""


def _program(name: str) -> Path:
    """A program that comes with the client library; where that is missing, a path at which there is none."""
    package = importlib.util.find_spec("mooncake")
    folders = (package.submodule_search_locations if package else None) or []
    return next((Path(folder) / name for folder in folders), Path("/nonexistent"))
