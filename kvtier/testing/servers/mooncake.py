"""A real Mooncake pool: its master, and one client that gives memory."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar
from urllib.error import URLError
from urllib.request import urlopen

from kvtier.keys import ChunkKey
from kvtier.testing.servers.base import PATIENCE_SECONDS, Server, free_port

HOST = "127.0.0.1"
SEGMENT = "512 MB"
PROGRAMS = ("mooncake_master", "mooncake_client")

CORRUPT = """
import sys
from mooncake.store import MooncakeDistributedStore
name, host, master = sys.argv[1:]
store = MooncakeDistributedStore()
assert store.setup(host, "P2PHANDSHAKE", 0, 256 << 20, "tcp", "", master) == 0
value = bytearray(store.get(name))
if value:
    value[len(value) // 2] ^= 0x10
    assert store.upsert(name, bytes(value)) == 0
store.close()
sys.exit(not value)
"""
"""A client beside the tier's: put in the place of what is held, with one byte flipped."""


class MooncakeServer(Server):
    """``mooncake_master``, and a ``mooncake_client`` whose 512 MB are all that the pool has.

    Both are started, paused and killed together.
    """

    type: ClassVar[str] = "mooncake"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.prefix = "kvtier:"
        """What the names of chunks begin with, so that tests may share a pool."""
        self._master_port, self._admin_port, self._client_port = free_port(), free_port(), free_port()

    @classmethod
    def missing(cls) -> str | None:
        """Its programs come with the client library."""
        found = _programs()
        if found is None or not all((found / name).exists() for name in PROGRAMS):
            return "the Mooncake servers are missing: pip install 'kvtier[mooncake]'"
        return None

    @property
    def master(self) -> str:
        """Host and port of the master."""
        return f"{HOST}:{self._master_port}"

    def tier(self) -> dict[str, Any]:
        """The settings of a tier that uses it and gives no memory itself."""
        return {"type": self.type, "master": self.master, "local_hostname": HOST, "prefix": self.prefix}

    def corrupt(self, key: ChunkKey) -> bool:
        """Have another client replace the chunk with one byte flipped."""
        command = [sys.executable, "-c", CORRUPT, self.prefix + key.hex(), HOST, self.master]
        with self.log.open("ab") as output:
            ended = subprocess.run(
                command, stdout=output, stderr=output, timeout=PATIENCE_SECONDS, check=False
            )
        return ended.returncode == 0

    def _launch(self) -> None:
        programs = _programs()
        assert programs is not None, self.missing()
        self._spawn(
            [
                str(programs / "mooncake_master"),
                f"--rpc_address={HOST}",
                f"--rpc_port={self._master_port}",
                f"--metrics_host={HOST}",
                f"--metrics_port={self._admin_port}",
            ]
        )
        # The client gives up where it finds no master.
        self._wait_until(lambda: bool(self._admin("health")), "did not answer")
        self._spawn(
            [
                str(programs / "mooncake_client"),
                f"--host={HOST}",
                f"--port={self._client_port}",
                f"--master_server_address={self.master}",
                "--metadata_server=P2PHANDSHAKE",
                f"--global_segment_size={SEGMENT}",
            ]
        )

    def _answers(self) -> bool:
        return bool(self._admin("get_all_segments"))

    def _admin(self, question: str) -> bytes:
        """What the master's own web server says; nothing while it is not there."""
        try:
            with urlopen(f"http://{HOST}:{self._admin_port}/{question}", timeout=PATIENCE_SECONDS) as answer:
                said: bytes = answer.read()
                return said
        except URLError:
            return b""


def _programs() -> Path | None:
    """The folder that holds the servers."""
    package = importlib.util.find_spec("mooncake")
    return (
        Path(package.submodule_search_locations[0])
        if package and package.submodule_search_locations
        else None
    )
