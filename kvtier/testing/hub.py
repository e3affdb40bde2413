"""A hub of models on loopback: what huggingface_hub asks of one, answered from folders."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import unquote, urlsplit

from blake3 import blake3

COMMIT_CHARACTERS = 40
DEFAULT_BRANCH = "main"
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    etag: str


@dataclass
class _Repository:
    commits: dict[str, dict[str, _File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        """Return the commit of a branch or of a commit's own name."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)


class Hub:
    """A server of models by name and revision, for the clients of :meth:`variables`. Thread-safe."""

    def __init__(self) -> None:
        self._repositories: dict[str, _Repository] = {}
        self._server = ThreadingHTTPServer((LOOPBACK, 0), _Handler)
        self._server.daemon_threads = True
        cast("Any", self._server).hub = self
        self.url = f"http://{LOOPBACK}:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="hub", daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def push(self, name: str, folder: Path, branch: str = DEFAULT_BRANCH) -> str:
        """Commit the files of a folder to a branch, and return the commit. The folder must not change.

        The commit depends on the names and contents of the files only. Reads all of them.
        """
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): _file(path) for path in paths}
        listing = json.dumps({file: found.etag for file, found in files.items()})
        commit = blake3(listing.encode()).hexdigest()[:COMMIT_CHARACTERS]
        repository = self._repositories.setdefault(name, _Repository())
        repository.commits[commit] = files
        repository.branches[branch] = commit
        return commit

    def variables(self, home: Path) -> dict[str, str]:
        """Return the environment of a client that uses this hub, and keeps its downloads in a folder."""
        exempt = filter(None, [os.environ.get("NO_PROXY"), os.environ.get("no_proxy"), LOOPBACK])
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
            "VLLM_USE_MODELSCOPE": "0",
            **dict.fromkeys(("NO_PROXY", "no_proxy"), ",".join(exempt)),
        }

    def _repository(self, name: str) -> _Repository | None:
        return self._repositories.get(name)


def _file(path: Path) -> _File:
    digest = blake3()
    digest.update_mmap(path)
    return _File(path, path.stat().st_size, digest.hexdigest())


class _NotFound(Exception):
    """There is no such repository, revision or entry: the message is the hub's error code for that."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer with a description, or with a file."""
        try:
            self._answer()
        except _NotFound as error:
            self._send_json({"error": "not found"}, HTTPStatus.NOT_FOUND, {"X-Error-Code": str(error)})

    do_HEAD = do_GET  # noqa: N815 - the name in the base class

    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - as in the base class
        """Log nothing."""

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        if path.startswith("api/models/"):
            self._describe(path.removeprefix("api/models/"))
            return
        name, found, rest = path.partition("/resolve/")
        if not found:
            raise _NotFound("EntryNotFound")
        commit, file = self._commit(name, rest)
        entry = self._files(name, commit).get(file)
        if entry is None:
            raise _NotFound("EntryNotFound")
        self._send_file(entry, commit)

    def _describe(self, path: str) -> None:
        """Answer with a repository at a revision, or with its files."""
        for kind in ("/revision/", "/tree/"):
            name, found, revision = path.partition(kind)
            if found:
                break
        commit, folder = self._commit(name, revision or DEFAULT_BRANCH)
        files = self._files(name, commit)
        if found == "/tree/":
            prefix = f"{folder}/" if folder else ""
            entries = list(_entries(files, prefix))
            if prefix and not entries:
                raise _NotFound("EntryNotFound")
            self._send_json(entries)
            return
        siblings = [{"rfilename": file} for file in files]
        self._send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})

    def _commit(self, name: str, path: str) -> tuple[str, str]:
        """Return the commit that a path begins with, by its name or a branch, and the rest of the path."""
        repository = self._hub._repository(name)
        if repository is None:
            raise _NotFound("RepoNotFound")
        revision, _, rest = path.partition("/")
        commit = repository.commit(revision)
        if commit is None:
            raise _NotFound("RevisionNotFound")
        return commit, rest

    def _files(self, name: str, commit: str) -> Mapping[str, _File]:
        repository = self._hub._repository(name)
        assert repository is not None
        return repository.commits[commit]

    @property
    def _hub(self) -> Hub:
        return cast("Hub", cast("Any", self.server).hub)

    def _send_json(
        self, body: object, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> None:
        encoded = json.dumps(body).encode()
        self._send_head(status, {"Content-Type": "application/json", **(headers or {})}, len(encoded))
        if self.command != "HEAD":
            self.wfile.write(encoded)

    def _send_file(self, entry: _File, commit: str) -> None:
        headers = {"ETag": f'"{entry.etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start, _, stop = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        first, end = int(start), min(int(stop) + 1, entry.size) if stop else entry.size
        status = HTTPStatus.OK
        if "Range" in self.headers:
            status = HTTPStatus.PARTIAL_CONTENT
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{entry.size}"
        self._send_head(status, headers, end - first)
        if self.command != "HEAD":
            with entry.path.open("rb") as file:
                self.connection.sendfile(file, first, end - first)

    def _send_head(self, status: HTTPStatus, headers: Mapping[str, str], size: int) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()


def _entries(files: Mapping[str, _File], prefix: str) -> Iterator[dict[str, object]]:
    """Yield the files below a folder as the hub lists them."""
    for name, file in files.items():
        if name.startswith(prefix):
            yield {"type": "file", "path": name, "size": file.size, "oid": file.etag[:COMMIT_CHARACTERS]}
