"""The web page: the files in ``page/``, served unchanged.

Files are read once, when the page is mounted, and served from memory: no request waits for a disk. Browsers
revalidate every file by its ETag, so an upgrade takes effect at once. The Content-Security-Policy limits the
page to its own scripts and its own controller, whatever names instances have.
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
"""Path of the scripts and the style sheet. The page itself is at ``/``."""
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
    """One file of the page, with its response headers."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()
        self._tag = f'"{blake2b(self._content, digest_size=12).hexdigest()}"'
        self._headers = {"Content-Type": CONTENT_TYPES[path.suffix], "ETag": self._tag, **HEADERS}

    async def answer(self, request: Request) -> Response:
        """Return the file, or 304 if the browser has the current version."""
        # A compressing proxy makes the tag weak; it still identifies the same file.
        known = request.headers.get("If-None-Match", "").replace("W/", "").split(",")
        if self._tag in (tag.strip() for tag in known):
            return Response(status_code=304, headers=self._headers)
        return Response(self._content, headers=self._headers)


def mount(app: FastAPI) -> None:
    """Serve the page at ``/`` and its files under ``/page/``, without a token: they contain no secrets.

    Reads the files, which takes about 1 ms. Raises: OSError: the files are missing.
    """
    for path in FILES.iterdir():
        if path.suffix in CONTENT_TYPES:
            at = "/" if path.name == INDEX else PREFIX + path.name
            app.router.routes.append(Route(at, _File(path).answer))
