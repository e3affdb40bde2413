"""The page for people: the files beside this module, served as they are.

They are read once, when the page is mounted, and answered from memory: no request waits for a disk. A
browser asks each time whether a file has changed and is mostly told that it has not, so that nobody looks at
yesterday's page after an upgrade. What the page may do is said by the server: it runs its own scripts and
talks to its own controller, nothing else, whatever name an instance has given itself.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FILES = Path(__file__).with_name("page")
PREFIX = "/page/"
"""Where the scripts and the style sheet are. ``/`` is the page itself."""
INDEX = "index.html"
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class _File:
    """One file of the page, with the headers that go with it."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._tag = f'"{blake2b(self._content, digest_size=12).hexdigest()}"'
        self._headers = {"Content-Type": CONTENT_TYPES[path.suffix], "ETag": self._tag, **HEADERS}

    async def answer(self, request: Request) -> Response:
        """The file, or that it is the one that the browser has."""
        # A proxy that compresses makes the tag a weak one, which still names the same file.
        known = request.headers.get("If-None-Match", "").replace("W/", "").split(",")
        if self._tag in (tag.strip() for tag in known):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


def mount(app: FastAPI) -> None:
    """Serve the page at ``/`` and its files below ``/page/``, without a token: they hold no secret.

    Reads the files, which takes about a millisecond. Raises ``OSError`` where they are missing.
    """
    for path in FILES.iterdir():
        if path.suffix in CONTENT_TYPES:
            at = "/" if path.name == INDEX else PREFIX + path.name
            app.router.routes.append(Route(at, _File(path).answer))
