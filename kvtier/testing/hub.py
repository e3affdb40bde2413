"""A hub of models on loopback: what huggingface_hub asks of one, answered from folders."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from anyio.from_thread import start_blocking_portal
from blake3 import blake3
from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse

from kvtier.http import serving

COMMIT_CHARACTERS = 40
DEFAULT_BRANCH = "main"
LOOPBACK = "127.0.0.1"
READ = ["GET", "HEAD"]


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    etag: str


@dataclass
class _Repository:
    commits: dict[str, dict[str, _File]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)


class Hub:
    """A server of models by name and revision, for the clients of :meth:`variables`. Thread-safe."""

    def __init__(self) -> None:
        self._repositories: dict[str, _Repository] = {}
        # Without FastAPI's own pages, whose paths may be those of models.
        app = FastAPI(openapi_url=None)
        models = "/api/models/{name:path}"
        app.get(models + "/tree/{revision}")(self._list)
        app.get(models + "/tree/{revision}/{folder:path}")(self._list)
        app.get(models + "/revision/{revision}")(self._describe)
        app.get(models)(self._describe)
        app.api_route("/{name:path}/resolve/{revision}/{file:path}", methods=READ)(self._file)
        self._app = app
        self._stack = ExitStack()
        self.url = ""
        """Known while it serves."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            opening = serving(self._app, f"{LOOPBACK}:0")
            host, port = stack.enter_context(portal.wrap_async_context_manager(opening))
            self.url = f"http://{host}:{port}"
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

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

    def _describe(self, name: str, revision: str = DEFAULT_BRANCH) -> dict[str, Any]:
        commit, files = self._commit(name, revision)
        siblings = [{"rfilename": file} for file in files]
        return {"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []}

    def _list(self, name: str, revision: str, folder: str = "") -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        _, files = self._commit(name, revision)
        entries = [
            {"type": "file", "path": path, "size": file.size, "oid": file.etag[:COMMIT_CHARACTERS]}
            for path, file in files.items()
            if path.startswith(prefix)
        ]
        if prefix and not entries:
            raise _not_found("EntryNotFound")
        return entries

    def _file(self, name: str, revision: str, file: str) -> FileResponse:
        commit, files = self._commit(name, revision)
        if file not in files:
            raise _not_found("EntryNotFound")
        found = files[file]
        return FileResponse(found.path, headers={"ETag": f'"{found.etag}"', "X-Repo-Commit": commit})

    def _commit(self, name: str, revision: str) -> tuple[str, Mapping[str, _File]]:
        """Return the commit of a branch or of a commit's own name, and its files."""
        repository = self._repositories.get(name)
        if repository is None:
            raise _not_found("RepoNotFound")
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            raise _not_found("RevisionNotFound")
        return commit, repository.commits[commit]


def _not_found(code: str) -> HTTPException:
    """Return the answer for a repository, revision or entry that does not exist, with the hub's code."""
    return HTTPException(404, headers={"X-Error-Code": code})


def _file(path: Path) -> _File:
    digest = blake3()
    digest.update_mmap(path)
    return _File(path, path.stat().st_size, digest.hexdigest())
