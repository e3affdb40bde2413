"""What both demos share: what the command line may choose, the folders, the model and prompts."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from rich.console import Console
from rich.markup import escape

from kvtier.bridge import client as bridge
from kvtier.demo.causes import causes
from kvtier.demo.client import Client
from kvtier.demo.model import is_model, make_model, prompt_text
from kvtier.demo.report import Steps
from kvtier.demo.server import DemoFailed
from kvtier.errors import ChannelError

CHUNK_TOKENS = 256
SPARE_TOKENS = 64
WARM_UP_TOKENS = 32
"""Fewer than a chunk, so that nothing of the request before the measured one is stored."""
VLLM_READY_SECONDS = 600.0
CACHE_READY_SECONDS = 120.0
LOCAL_MODEL_ARGUMENTS = ("--kv-cache-memory-bytes", "1G", "--gpu-memory-utilization", "0.3")
"""The small model needs 2 GB, and vLLM starts only where all that it may take is free."""


@dataclass(frozen=True)
class Options:
    """What the command line may choose."""

    model: str | None = None
    """A model's folder or name; ``None`` makes one."""
    tokens: int = 6000
    """Length of the prompt."""
    work_dir: Path | None = None
    """Where the model, logs and the disk tier go; ``None`` for a temporary folder."""
    keep: bool = False
    """Leave logs and disk tier behind."""
    dtype: str = "float32"
    """In narrower types near-ties flip with the shape of a batch, with or without a cache."""
    vllm_arguments: Sequence[str] = ()


@dataclass
class Work:
    """Where everything of one demo lies."""

    model: Path
    folder: Path
    sockets: Path
    """A folder with a short name: a socket's path may only be 107 bytes long."""
    keep: bool = False
    """Leave :attr:`folder` behind: the user wants it, or needs it to see what went wrong."""

    def config(self, name: str = "kvtier") -> Path:
        """A settings file."""
        return self.folder / f"{name}.yaml"

    def log(self, name: str) -> Path:
        """What a server has printed."""
        return self.folder / f"{name}.log"

    def socket(self, name: str = "kvtier") -> Path:
        """Where a cache process is reached."""
        return self.sockets / f"{name}.sock"


def model_of(options: Options, work: Work, steps: Steps) -> str:
    """The folder or name of the model, which is made where none was named."""
    if options.model is not None:
        return options.model
    if not is_model(work.model):
        with steps.step("making a model of 100 M parameters"):
            make_model(work.model)
    return str(work.model)


def vllm_arguments(options: Options) -> list[str]:
    """For every vLLM server of a demo."""
    arguments = ["--dtype", options.dtype, *options.vllm_arguments]
    return arguments if options.model is not None else [*LOCAL_MODEL_ARGUMENTS, *arguments]


def cache_answers(socket: Path) -> bool:
    """Whether a cache process serves there."""
    try:
        bridge.status(socket)
    except ChannelError:
        return False
    return True


def make_prompts(client: Client, tokens: int, count: int = 1) -> list[list[int]]:
    """Real text of so many tokens each, nothing of it twice. Raises :class:`DemoFailed` for too many."""
    text = client.tokenize(prompt_text())
    if len(text) < tokens * count:
        raise DemoFailed(f"--tokens: the demo's text suffices for {len(text) // count}, write at most that")
    return [text[start : start + tokens] for start in range(0, tokens * count, tokens)]


@contextlib.contextmanager
def work_folder(options: Options) -> Iterator[Work]:
    """Folders for one demo, removed at the end unless they are to be kept.

    They are kept where the demo fails, too; then its :class:`DemoFailed` says where they are.
    """
    with tempfile.TemporaryDirectory(prefix="kvtier-") as sockets:
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
            told = [str(error), "", *causes(folder), f"logs and settings are kept in {folder}"]
            raise DemoFailed("\n".join(told)) from error
        finally:
            if not work.keep:
                rmtree(folder, ignore_errors=True)
            if options.work_dir is None and not options.keep:
                rmtree(base if not work.keep else work.model, ignore_errors=True)


def conclude(problems: Sequence[str], work: Work, console: Console, kept: str) -> None:
    """Print the problems and the causes; keep the folder if there are any, and print where it is."""
    for problem in problems:
        console.print(f"[red]✗[/] {escape(problem)}", highlight=False)
    if problems:
        work.keep = True
        for line in causes(work.folder):
            console.print(escape(line), highlight=False, soft_wrap=True)
    if work.keep:
        console.print(f"{kept}: {escape(str(work.folder))}", highlight=False, soft_wrap=True)
