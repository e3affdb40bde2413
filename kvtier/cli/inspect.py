"""``kvtier inspect``: inspect a disk tier's folder without a cache process."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.markup import escape
from rich.progress import Progress

from kvtier.cli.terminal import AsJson, messages, output, print_json, table
from kvtier.errors import CorruptChunk, TierError

if TYPE_CHECKING:
    from kvtier.backends.disk.folder import ObjectFolder

app = typer.Typer(
    name="inspect", no_args_is_help=True, help="List, verify and remove the chunks in a disk tier's folder."
)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The `path` of a disk tier.")
]


class File(NamedTuple):
    """One chunk object on disk."""

    last_used: float
    """Unix timestamp in seconds."""
    length: int
    path: Path


@app.command()
def ls(
    folder: Folder,
    limit: Annotated[int, typer.Option(min=0, help="Number of chunks to list; 0 for all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the chunks, most recently used first, and their total size."""
    from kvtier.backends.disk.backend import lock_holder

    chunks = total = 0

    def counted() -> Iterator[File]:
        nonlocal chunks, total
        for file in _files(folder):
            chunks, total = chunks + 1, total + file.length
            yield file

    listed = heapq.nlargest(limit, counted()) if limit else sorted(counted(), reverse=True)
    holder = lock_holder(folder)
    described = [_described(file) for file in listed]
    if as_json:
        print_json(
            {"folder": str(folder), "holder": holder, "chunks": chunks, "bytes": total, "listed": described}
        )
        return
    _print_listing(described)
    from kvtier.units import format_size

    more = f" ({chunks - len(listed)} not listed: --limit 0)" if chunks > len(listed) else ""
    held = f"In use by {holder}." if holder else "In use by no process."
    output().print(f"{chunks} chunks, {format_size(total)}{more}. {escape(held)}")


@app.command()
def verify(
    folder: Folder,
    delete: Annotated[bool, typer.Option("--delete", help="Remove corrupt chunks.")] = False,
) -> None:
    """Read every chunk and verify its header and checksum.

    Exit status 1 if any is corrupt, whether removed or not. A cache process may be running, except with
    --delete.
    """
    from kvtier.units import format_size

    if delete:
        with _claimed(folder):
            checked, read, corrupt = _verify(folder, delete=True)
    else:
        checked, read, corrupt = _verify(folder, delete=False)
    for path, problem in corrupt:
        output().print(f"[red]corrupt[/red] {escape(str(path))}: {escape(problem)}")
    removed = " and removed" if delete and corrupt else ""
    output().print(f"{checked} chunks, {format_size(read)} read, {len(corrupt)} corrupt{removed}.")
    if corrupt:
        raise typer.Exit(1)


@app.command()
def purge(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove all chunks. Refused while a cache process uses the folder. Other files are kept."""
    from kvtier.units import format_size

    with _claimed(folder) as claimed:
        # Listing removes leftovers of interrupted writes.
        paths = list(claimed.objects())
        total = sum(path.stat().st_size for path in paths)
        if paths and not yes:
            typer.confirm(
                f"Remove {len(paths)} chunks, {format_size(total)}, from {folder}?", abort=True, err=True
            )
        with Progress(console=messages(), transient=True) as progress:
            for path in progress.track(paths, description="removing"):
                path.unlink(missing_ok=True)
        for prefix in {path.parent for path in paths}:
            with suppress(OSError):
                prefix.rmdir()
    output().print(f"{len(paths)} chunks removed, {format_size(total)} freed.")


@contextmanager
def _claimed(folder: Path) -> Iterator[ObjectFolder]:
    """Lock the folder. Raises: TierError: names the process that uses it."""
    from kvtier.backends.disk.backend import lock_holder
    from kvtier.backends.disk.folder import ObjectFolder

    holder = lock_holder(folder)
    if holder is not None:
        raise TierError(f"{folder} is in use by {holder}: stop that process first")
    claimed = ObjectFolder("inspect", folder, direct=False)
    try:
        yield claimed
    finally:
        claimed.close()


def _files(folder: Path) -> Iterator[File]:
    from kvtier.backends.disk.backend import walk

    for path in walk(folder):
        with suppress(FileNotFoundError):
            status = path.stat()
            yield File(status.st_mtime, status.st_size, path)


def _described(file: File) -> dict[str, object]:
    from kvtier.memory.header import HEADER_BYTES, StoredHeader

    facts: dict[str, object] = {
        "key": file.path.stem,
        "bytes": file.length,
        "last_used": datetime.fromtimestamp(file.last_used, UTC).isoformat(timespec="seconds"),
    }
    try:
        with file.path.open("rb") as stream:
            header, codec, *_ = StoredHeader.parse(stream.read(HEADER_BYTES))
    except (CorruptChunk, OSError) as error:
        return {**facts, "problem": str(error)}
    return {
        **facts,
        "payload_bytes": header.payload_bytes,
        "codec": codec,
        "parent": header.parent.hex(),
        "namespace": header.namespace.hex(),
    }


def _print_listing(described: list[dict[str, object]]) -> None:
    rows = table("key", "bytes", "last used", "model and layout")
    for facts in described:
        about = (
            f"[red]{escape(str(facts['problem']))}[/red]"
            if "problem" in facts
            else str(facts["namespace"])[:16]
        )
        rows.add_row(str(facts["key"])[:16], str(facts["bytes"]), str(facts["last_used"]), about)
    if described:
        output().print(rows)


def _verify(folder: Path, *, delete: bool) -> tuple[int, int, list[tuple[Path, str]]]:
    """Return the number of chunks checked, the bytes read, and the corrupt files with the reason."""
    from kvtier.memory.header import StoredHeader
    from kvtier.memory.keys import ChunkKey

    files = list(_files(folder))
    checked = read = 0
    corrupt = []
    with Progress(console=messages(), transient=True) as progress:
        bar = progress.add_task("verifying", total=sum(file.length for file in files))
        for file in files:
            try:
                content = file.path.read_bytes()
                read += len(content)
                StoredHeader.verify(memoryview(content), ChunkKey(bytes.fromhex(file.path.stem)))
            except FileNotFoundError:
                # Evicted by a running cache process.
                continue
            except OSError as error:
                # Not deleted, as its content is unknown.
                corrupt.append((file.path, f"cannot be read: {error}"))
            except CorruptChunk as error:
                corrupt.append((file.path, str(error)))
                if delete:
                    file.path.unlink(missing_ok=True)
            checked += 1
            progress.advance(bar, file.length)
    return checked, read, corrupt
