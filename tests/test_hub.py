"""The hub on loopback answers as huggingface_hub expects."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from kvtier.testing.hub import Hub

NAME = "org/model"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "onnx" / "weights.bin").write_bytes(bytes(range(100)))
    with Hub() as hub:
        yield hub


@pytest.fixture
def client(hub: Hub) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=hub.url, trust_env=False) as client:
        yield client


def test_hub_describes_a_model_at_each_revision(hub: Hub, client: httpx.Client, tmp_path: Path) -> None:
    commit = hub.push(NAME, tmp_path)
    for path in ("", "/revision/main", f"/revision/{commit}"):
        answer = client.get(f"/api/models/{NAME}{path}").raise_for_status().json()
        assert answer["sha"] == commit
        assert {file["rfilename"] for file in answer["siblings"]} == {"config.json", "onnx/weights.bin"}
    (entry,) = client.get(f"/api/models/{NAME}/tree/main/onnx").raise_for_status().json()
    assert (entry["path"], entry["size"], entry["type"]) == ("onnx/weights.bin", 100, "file")


def test_hub_ends_although_a_client_does_not_read(tmp_path: Path) -> None:
    with (tmp_path / "weights.bin").open("wb") as file:
        file.truncate(64 << 20)
    with socket.socket() as client, Hub() as hub:
        hub.push(NAME, tmp_path)
        address = urlsplit(hub.url)
        client.connect((address.hostname, address.port))
        client.sendall(f"GET /{NAME}/resolve/main/weights.bin HTTP/1.1\r\nHost: hub\r\n\r\n".encode())
        assert client.recv(12) == b"HTTP/1.1 200"


def test_hub_serves_files_in_parts(hub: Hub, client: httpx.Client, tmp_path: Path) -> None:
    commit = hub.push(NAME, tmp_path)
    path = f"/{NAME}/resolve/main/onnx/weights.bin"
    head = client.head(path)
    assert (head.headers["Content-Length"], head.headers["X-Repo-Commit"]) == ("100", commit)
    part = client.get(path, headers={"Range": "bytes=90-"})
    assert (part.status_code, part.content) == (206, bytes(range(90, 100)))
    assert part.headers["ETag"] == head.headers["ETag"] == client.get(path).headers["ETag"]
    assert client.get(path, headers={"Range": "bytes=0-9"}).content == bytes(range(10))


@pytest.mark.parametrize(
    ("path", "code"),
    [
        (f"/{NAME}/resolve/main/none.json", "EntryNotFound"),
        (f"/api/models/{NAME}/tree/main/none", "EntryNotFound"),
        (f"/{NAME}/resolve/none/config.json", "RevisionNotFound"),
        ("/api/models/org/none", "RepoNotFound"),
    ],
)
def test_missing_models_and_files_have_their_error_code(
    hub: Hub, client: httpx.Client, tmp_path: Path, path: str, code: str
) -> None:
    hub.push(NAME, tmp_path)
    answer = client.get(path)
    assert (answer.status_code, answer.headers["X-Error-Code"]) == (404, code)


def test_branch_moves_and_commits_stay(hub: Hub, client: httpx.Client, tmp_path: Path) -> None:
    first = hub.push(NAME, tmp_path)
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "config.json").write_text('{"newer": true}')
    second = hub.push(NAME, tmp_path / "newer")
    assert hub.push(NAME, tmp_path / "newer") == second != first
    assert client.get(f"/{NAME}/resolve/{first}/config.json").text == "{}"
    assert client.get(f"/{NAME}/resolve/main/config.json").json() == {"newer": True}


def test_other_servers_of_the_process_log_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "level", logging.WARNING)
    with Hub():
        assert (logger.level, logger.propagate) == (logging.WARNING, True)
