"""``kvtier inspect``: inspect a disk tier's folder without a cache process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import Progress

from kvtier.cli.terminal import AsJson, messages, output, print_json, table

if TYPE_CHECKING:
    from kvtier.cli.inspect_files import Failures

app = typer.Typer(
    name="inspect", no_args_is_help=True, help="List, verify and remove the chunks in a disk tier's folder."
)

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="The `path` of a disk tier.")
]
KEY_FILE = typer.Option("--key-file", exists=True, dir_okay=False, help="The `encrypt.key_file` of the tier.")


@app.command()
def ls(
    folder: Folder,
    limit: Annotated[int, typer.Option(min=0, help="Number of chunks to list; 0 for all.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the chunks, most recently used first, and their total size."""
    import anyio

    from kvtier.cli.inspect_files import list_chunks
    from kvtier.units import format_size

    holder, chunks, total, described = anyio.run(list_chunks, folder, limit, _print_unread)
    if as_json:
        print_json(
            {"folder": str(folder), "holder": holder, "chunks": chunks, "bytes": total, "listed": described}
        )
        return
    _print_listing(described)
    more = f" ({chunks - len(described)} not listed: --limit 0)" if chunks > len(described) else ""
    held = f"In use by {holder}." if holder else "In use by no process."
    output().print(f"{chunks} chunks, {format_size(total)}{more}. {escape(held)}")


@app.command()
def verify(
    folder: Folder,
    delete: Annotated[bool, typer.Option("--delete", help="Remove corrupt chunks.")] = False,
    key_file: Annotated[Path | None, KEY_FILE] = None,
) -> None:
    """Read every chunk, verify its header and checksum, and decode it.

    What is encrypted is decoded with --key-file only. Exit status 1 if any is corrupt, whether removed or
    not, or unreadable: those are never removed, as another codec or key may read them. A cache process may be
    running, except with --delete.
    """
    import anyio

    from kvtier.cli import inspect_files
    from kvtier.units import format_size

    unread = 0

    def note(path: Path, error: OSError) -> None:
        nonlocal unread
        unread += 1
        _print_unread(path, error)

    with Progress(console=messages(), transient=True) as progress:
        bar = progress.add_task("verifying", total=1)

        def show(done: float) -> None:
            progress.update(bar, completed=done)

        checked, read, corrupt, unreadable, encrypted = anyio.run(
            partial(
                inspect_files.verify, folder, delete=delete, progress=show, failed=note, key_file=key_file
            )
        )
    for path, problem in corrupt:
        output().print(f"[red]corrupt[/red] {escape(str(path))}: {escape(problem)}")
    _print_failures("unreadable", unreadable)
    removed = " and removed" if delete and corrupt else ""
    others = f", {unreadable.count} unreadable" if unreadable.count else ""
    output().print(f"{checked} chunks, {format_size(read)} read, {len(corrupt)} corrupt{removed}{others}.")
    if encrypted:
        output().print(f"{encrypted} are encrypted, and only their checksum was verified: use --key-file.")
    if corrupt or unread or unreadable.count:
        raise typer.Exit(1)


@app.command()
def rekey(
    folder: Folder,
    key_file: Annotated[Path, KEY_FILE],
    plain: Annotated[
        bool,
        typer.Option(
            "--plain",
            help="Also encrypt chunks that are not encrypted: only if nobody else could write to the folder.",
        ),
    ] = False,
) -> None:
    """Encrypt the chunks again that are not encrypted with the first key of the file.

    Each line of the file has the number of a key and 64 hexadecimal digits: a new key comes first, and the
    old ones stay below it until this has ended.

    Decrypts all, also those with the first key, to see whether the keys are theirs. Refused while a cache
    process uses the folder. If interrupted, run it again. Exit status 1 if some could not be read.
    """
    import anyio

    from kvtier.cli import inspect_files

    with Progress(console=messages(), transient=True) as progress:
        bar = progress.add_task("encrypting", total=1)

        def show(done: float) -> None:
            progress.update(bar, completed=done)

        found = anyio.run(partial(inspect_files.rekey, folder, key_file, show, plain=plain))
    _print_failures("unchanged", found.failed)
    if not found.chunks:
        output().print(f"{escape(str(folder))} holds no chunks: is it the `path` of the tier?")
        raise typer.Exit(1)
    output().print(
        f"{found.chunks} chunks: {found.changed} encrypted again, {found.current} had the first key of "
        f"{escape(str(key_file))} (number {found.first_key}) already."
    )
    if found.plain:
        output().print(f"{found.plain} are not encrypted, and left so: see --plain.")
    if found.failed.count:
        raise typer.Exit(1)


@app.command()
def purge(
    folder: Folder,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove all chunks. Refused while a cache process uses the folder. Other files are kept.

    Exit status 1 if something could not be listed.
    """
    import anyio

    from kvtier.cli.inspect_files import claimed_chunks, remove
    from kvtier.units import format_size

    files, unread = anyio.run(claimed_chunks, folder)
    if unread:
        messages().print(f"[yellow]not removed[/yellow] {escape(unread)}")
    total = sum(file.length for file in files)
    # The folder is not locked while the question waits: remove() claims it again.
    if files and not yes:
        typer.confirm(
            f"Remove {len(files)} chunks, {format_size(total)}, from {folder}?", abort=True, err=True
        )
    with Progress(console=messages(), transient=True) as progress:
        bar = progress.add_task("removing", total=len(files))
        anyio.run(remove, folder, files, partial(progress.advance, bar))
    output().print(f"{len(files)} chunks removed, {format_size(total)} freed.")
    if unread:
        raise typer.Exit(1)


def _print_unread(path: Path, error: OSError) -> None:
    messages().print(
        f"[yellow]cannot read[/yellow] {escape(str(path))}: {escape(error.strerror or str(error))}"
    )


def _print_failures(what: str, failures: Failures) -> None:
    for path, problem in sorted(failures.first):
        output().print(f"[red]{what}[/red] {escape(str(path))}: {escape(problem)}")
    if more := failures.count - len(failures.first):
        output().print(f"[red]{what}[/red] and {more} more.")


def _print_listing(described: list[dict[str, object]]) -> None:
    rows = table("key", "bytes", "of", "codec", "encrypted", "last used", "model and layout")
    for facts in described:
        about = (
            f"[red]{escape(str(facts['problem']))}[/red]"
            if "problem" in facts
            else str(facts["namespace"])[:16]
        )
        stored = (str(facts.get(name, "")) for name in ("bytes", "payload_bytes", "codec"))
        key = "" if facts.get("encrypted_with") is None else f"key {facts['encrypted_with']}"
        rows.add_row(str(facts["key"])[:16], *stored, key, str(facts["last_used"]), about)
    if described:
        output().print(rows)
