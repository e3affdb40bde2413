"""What both demos share: options, folders, model, prompts, progress, and the warnings in their logs."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape

from kvtier.bridge import client as bridge
from kvtier.bridge.spawn import FALLBACKS
from kvtier.errors import ChannelError
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.model import is_model, make_model, prompt_text
from kvtier.lab.demo.server import DemoFailed
from kvtier.testing.hub import Hub

CHUNK_TOKENS = 256
SPARE_TOKENS = 64
WARM_UP_TOKENS = 32
"""Less than a chunk, so that the warm-up request stores nothing."""
VLLM_READY_SECONDS = 600.0
CACHE_READY_SECONDS = 120.0
MAX_BASE_BYTES = 40
"""vLLM adds 36 bytes and more to the path of its temporary folder."""
MODEL_NAME = "kvtier-demo/llama-100m"
"""The name of the generated model, as on a hub. No folder may have it: vLLM prefers folders."""
GENERATED_MODEL_ARGUMENTS = ("--kv-cache-memory-bytes", "1G", "--gpu-memory-utilization", "0.3")
"""The generated model needs 2 GB; vLLM refuses to start unless all memory that it may use is free."""
MAX_LINES = 12
"""Lines shown per log, the first ones."""
MAX_CHARACTERS = 400
"""Characters shown per line."""
_WARNING = re.compile(r"\b(?:WARNING|ERROR)\b")
_KVTIER = re.compile(r"kvtier|cache process|\btier \w+:")


@dataclass(frozen=True)
class Options:
    """Command-line options of the demo."""

    model: str | None = None
    """A model's folder or name; ``None`` generates one."""
    tokens: int = 6000
    """Length of the prompt."""
    work_dir: Path | None = None
    """Folder for the model, logs and the disk tier; ``None`` for a temporary one."""
    keep: bool = False
    """Keep logs and disk tier."""
    dtype: str = "float32"
    """In narrower types, near-ties between tokens depend on the batch shape, with or without a cache."""
    vllm_arguments: Sequence[str] = ()


@dataclass
class Work:
    """Paths of one demo run."""

    model: Path
    folder: Path
    sockets: Path
    """A folder with a short path, because a Unix socket path has at most 107 bytes."""
    keep: bool = False
    """Keep :attr:`folder`: on request, or to diagnose a failure."""

    def config(self, name: str = "kvtier") -> Path:
        """Return the path of a settings file."""
        return self.folder / f"{name}.yaml"

    def log(self, name: str) -> Path:
        """Return the path of a server's log."""
        return self.folder / f"{name}.log"

    def socket(self, name: str = "kvtier") -> Path:
        """Return the path of a cache process's socket."""
        return self.sockets / f"{name}.sock"


class Model(NamedTuple):
    """The model of a demo, as vLLM is given it."""

    name: str
    """Its folder, or its name on a hub."""
    variables: Mapping[str, str] = {}
    """The environment in which vLLM finds it."""


@contextlib.contextmanager
def served_model(options: Options, work: Work, steps: Steps) -> Iterator[Model]:
    """Yield the model; generate one if the options do not name any, and serve it from a hub on loopback."""
    if options.model is not None:
        yield Model(options.model)
        return
    if not is_model(work.model):
        with steps.step("generating a model of 100 M parameters"):
            make_model(work.model)
    downloads = work.folder / "downloads"
    with Hub() as hub:
        hub.push(MODEL_NAME, work.model)
        try:
            yield Model(MODEL_NAME, hub.variables(downloads))
        finally:
            rmtree(downloads, ignore_errors=True)


def vllm_arguments(options: Options) -> list[str]:
    """Return the arguments for every vLLM server of a demo."""
    arguments = ["--dtype", options.dtype, *options.vllm_arguments]
    return arguments if options.model is not None else [*GENERATED_MODEL_ARGUMENTS, *arguments]


def cache_answers(socket: Path) -> bool:
    """Whether a cache process responds on ``socket``."""
    try:
        bridge.status(socket)
    except ChannelError:
        return False
    return True


def make_prompts(client: Client, tokens: int, count: int = 1) -> list[list[int]]:
    """Return ``count`` disjoint prompts of real text. Raises :class:`DemoFailed` if the text is too short."""
    text = client.tokenize(prompt_text())
    if len(text) < tokens * count:
        raise DemoFailed(f"--tokens: the demo's text is sufficient for at most {len(text) // count}")
    return [text[start : start + tokens] for start in range(0, tokens * count, tokens)]


def _short_base() -> str | None:
    """Return a folder for Unix sockets, vLLM's among them, where the path of the temporary one is long."""
    bases = (tempfile.gettempdir(), *FALLBACKS)
    return next((base for base in bases if len(base) <= MAX_BASE_BYTES and os.access(base, os.W_OK)), None)


@contextlib.contextmanager
def work_folder(options: Options) -> Iterator[Work]:
    """Create the folders of one demo, and remove them at the end unless :attr:`Work.keep` is set.

    They are also kept if the demo raises :class:`DemoFailed`, whose message then contains their path.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-", dir=_short_base()) as sockets:
        if options.work_dir is not None:
            base = options.work_dir.expanduser().resolve()
            base.mkdir(parents=True, exist_ok=True)
        else:
            base = Path(tempfile.mkdtemp(prefix="kvtier-demo-"))
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=base))
        work = Work(base / "model", folder, Path(sockets), options.keep)
        try:
            yield work
        except DemoFailed as error:
            work.keep = True
            message = [str(error), "", *causes(folder), f"logs and settings are kept in {folder}"]
            raise DemoFailed("\n".join(message)) from error
        finally:
            if not work.keep:
                rmtree(folder, ignore_errors=True)
            if options.work_dir is None and not options.keep:
                rmtree(base if not work.keep else work.model, ignore_errors=True)


def conclude(problems: Sequence[str], work: Work, console: Console, kept: str) -> None:
    """Print problems and their likely causes from the logs; keep the folder if there are any problems."""
    for problem in problems:
        console.print(f"[red]✗[/] {escape(problem)}", highlight=False)
    if problems:
        work.keep = True
        for line in causes(work.folder):
            console.print(escape(line), highlight=False, soft_wrap=True)
    if work.keep:
        console.print(f"{kept}: {escape(str(work.folder))}", highlight=False, soft_wrap=True)


def causes(folder: Path) -> list[str]:
    """Return lines to print: the name of each log in ``folder`` that has warnings, and the warnings."""
    shown: list[str] = []
    for log in sorted(folder.glob("*.log")):
        if lines := warnings_in(log):
            shown += [f"{log.name} has these warnings:", *(f"  {line}" for line in lines)]
    return shown or ["the logs have no warnings"]


def warnings_in(log: Path) -> list[str]:
    """Return the warnings and errors in a log, without duplicates.

    Many of vLLM's warnings have nothing to do with the cache: they are returned only if kvtier logged none.
    """
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if _WARNING.search(line)]
    from_kvtier = [line for line in lines if _KVTIER.search(line)]
    return [line[:MAX_CHARACTERS] for line in dict.fromkeys(from_kvtier or lines)][:MAX_LINES]


class Steps:
    """Shows progress and the duration of each step: a spinner on a terminal, else plain lines."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Show ``what`` as in progress while the block runs."""
        started = time.perf_counter()
        if self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self._console.print(f"… {what}", highlight=False)
            yield
        seconds = time.perf_counter() - started
        self._console.print(f"[green]✓[/] {what} [dim]({seconds:.1f} s)[/]", highlight=False)
