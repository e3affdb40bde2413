"""The life of a cache process in a container: it starts, is healthy, stores, and drains. Run by a test.

    python -m tests.rigs.contained_serve '["kvtier", "serve"]' '["kvtier", "status"]'

The arguments are the command and the health check of the image. Prints what the test looks at, as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtier.bridge.client import status
from tests.rigs.bridges import KEYS, store
from tests.rigs.container import SETTINGS
from tests.rigs.waiting import wait_until

SOCKET = Path("/run/kvtier/kvtier.sock")


def writable(path: str) -> bool:
    try:
        (Path(path) / "test").touch()
    except OSError:
        return False
    return True


def main(serve: list[str], check: list[str]) -> dict[str, Any]:
    variables = {"KVTIER_CONFIG_FILE": str(SETTINGS / "kvtier.yaml"), "KVTIER_SOCKET": str(SOCKET)}
    environment = {**os.environ, **variables, "HOME": "/tmp"}
    process = subprocess.Popen(serve, env=environment)

    def healthy() -> bool:
        return subprocess.run(check, env=environment, capture_output=True, check=False).returncode == 0

    unhealthy_at_first = not healthy()
    wait_until(lambda: process.poll() is not None or healthy())
    scheduler, worker = store(SOCKET, KEYS[:8])
    report = status(SOCKET)
    scheduler.close()
    worker.close()
    process.send_signal(signal.SIGTERM)
    exit_status = process.wait(60)
    return {
        "user": os.getuid(),
        "writable": [path for path in ("/", "/etc", "/usr", str(Path.cwd()), "/run") if writable(path)],
        "unhealthy_at_first": unhealthy_at_first,
        "chunks": report["tiers"][0]["chunks"],
        "exit_status": exit_status,
        "files": len(list(Path("/var/cache/kvtier").rglob("*.kv"))),
    }


if __name__ == "__main__":
    print(json.dumps(main(*map(json.loads, sys.argv[1:]))))
