"""Inject fifteen faults into a running vLLM, one by one, and note what its cache says of each.

::

    python -m benchmarks.faults                             # kvtier, LMCache and vLLM's own offloading
    python -m benchmarks.faults --systems kvtier --faults "full disk" "hanging disk"

A fault makes tokens of a prompt a miss that would have been a hit. What a system says is what is in its logs
(at their default level) and metrics from the injection until two seconds after the answer, and is not there
for prompts that are just new, or hits: lines that differ in more than numbers, and series that change. Of
``kvtier why`` it is the reason. No judgement of what is helpful is needed, and a sign that is only close
counts.

All have 16 MiB of memory and a folder for files, whose disk is faulty on demand (``faulty_folder.py``).
vLLM's offloading on CPUs has a replacement for the worker that copies (``compare/offload_spec.py``).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from benchmarks.common import parse, show
from benchmarks.compare import systems
from benchmarks.compare.engines import tokens
from benchmarks.compare.systems import System
from benchmarks.faulty_folder import FaultyFolder
from kvtier.bridge import client as bridge
from kvtier.catalog.misses import text_of
from kvtier.errors import ChannelError
from kvtier.lab.demo import model as demo
from kvtier.lab.demo.client import Client, Completion
from kvtier.lab.demo.server import DemoFailed
from kvtier.units import MIB

LAYERS = 2
"""Of the model: prompts are computed quickly."""
MEMORY_BYTES = 16 * MIB
DISK_BYTES = 8192 * MIB
LENGTH, NEW_TOKENS = 1000, 8
"""A prompt takes 4 MB. Answers tell whether the KV was right."""
FILLING = 6
"""Prompts that do not fit into memory together."""
RESETS = 10
"""Blocks that are being stored cannot be emptied before another step."""
WRITE_SECONDS = 0.3
"""In which a disk has written a prompt, mostly."""
SETTLE_SECONDS = 2.0
"""Logs and metrics are written in the background."""
ANSWER_SECONDS = 20.0
"""After which a hanging disk answers again."""
READY_SECONDS = 300.0
RELEVANT = re.compile(r"kvtier|lmcache|offload|external|kv_connector|kv_offload", re.IGNORECASE)
NOISE = re.compile(
    r"_created|_bucket|_sum$|seconds|_bytes|throughput|Avg prompt|HTTP/1.1|safetensors|Filesystem type|"
    r"RotaryEmbedding|Loaded new LoRA|Reloading weights|shutdown|[Tt]erminat|exiting|KV Transfer metrics"
)
LABELS = {"reason", "tier", "op", "result", "status", "source"}
SHOWN_LINES, SHOWN_SERIES, SHOWN_CHARACTERS = 2, 3, 150


class Trial:
    """One system under test, with what the faults need of it."""

    def __init__(self, system: System, folder: Path, disk: FaultyFolder, socket: Path | None) -> None:
        self.system, self.folder, self.disk = system, folder, disk
        self.socket = socket
        """Of kvtier's cache process."""
        self.answers: list[Completion | None] = []
        """Of the requests since the injection; ``None`` without an answer."""
        self._http = httpx.Client(base_url=system.client.url, timeout=60, trust_env=False)
        self._normal: set[str] = set()
        self._seen: dict[Path, int] = {}
        self._series: dict[str, float] = {}

    def ask(self, prompt: Sequence[int], *, salt: str | None = None, model: str = "") -> Completion | None:
        """Run a request. A disk that hangs answers again after a while."""
        name = model or str(self.folder.parent / "model")
        with (
            ThreadPoolExecutor(1) as pool,
            Client(int(self.system.client.url.rpartition(":")[2]), name) as to,
        ):
            answer = pool.submit(to.complete, prompt, NEW_TOKENS, salt=salt)
            if wait([answer], ANSWER_SECONDS).not_done and self.disk.fault == "hanging":
                self.disk.set("")
            found: Completion | None = None
            with suppress(httpx.HTTPError, DemoFailed):
                found = answer.result()
        self.answers.append(found)
        return found

    def store(self, prompt: Sequence[int], **options: str) -> Completion | None:
        """Run a request whose KV is stored, and not held by vLLM itself."""
        answer = self.ask(prompt, **options)
        self.settle()
        return answer

    def settle(self) -> None:
        """Have everything stored, which some do in a later step, and empty vLLM's own cache."""
        for _ in range(RESETS):
            self.ask(tokens(f"settle {time.monotonic()}", 16))
            time.sleep(0.5)
            with suppress(httpx.HTTPError):
                if self._http.post("/reset_prefix_cache").json()["success"]:
                    return
        print("vLLM did not empty its own cache", file=sys.stderr, flush=True)

    def push_out(self) -> None:
        """Have memory filled with other prompts."""
        for _ in range(FILLING):
            self.ask(tokens(f"fill {time.monotonic()}", LENGTH))
            time.sleep(WRITE_SECONDS)
        self.settle()

    def post(self, path: str, **body: object) -> None:
        with suppress(httpx.HTTPError):
            self._http.post(path, json=body)

    def adapter(self, name: str, seed: int) -> None:
        """Load an adapter that was trained with a seed, in place of one of this name if there is one."""
        path = make_adapter(self.folder / name, seed)
        time.sleep(0.5)
        self.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), load_inplace=True)

    # What it says.

    def learn(self) -> None:
        """Note what is said of prompts that are new, and of hits."""
        for number in range(2):
            self.begin()
            prompt = tokens(f"normal {number}", LENGTH + 100 * number)
            for _ in range(2):
                self.store(prompt)
            self.push_out() if not number else None
            self.ask(prompt)
            self._normal |= {*self.end()[1]}
        for log in self._logs():
            self._normal |= {shape(line) for line in log.read_text(errors="replace").splitlines()}

    def begin(self) -> None:
        """Begin to observe."""
        time.sleep(SETTLE_SECONDS)
        self.answers = []
        self._seen = {log: log.stat().st_size for log in self._logs()}
        self._series = self._scrape()

    def end(self) -> tuple[list[str], list[str]]:
        """Return the lines that were logged, and the series that have changed."""
        time.sleep(SETTLE_SECONDS)
        lines = list[str]()
        for log, start in self._seen.items():
            with log.open("rb") as file:
                file.seek(start)
                lines += file.read().decode(errors="replace").splitlines()
        before, after = self._series, self._scrape()
        return lines, [name for name, value in after.items() if value != before.get(name, 0.0)]

    def said(self) -> tuple[list[str], list[str]]:
        """Return what was said that is not said of new prompts and hits: lines, and series."""
        lines, series = self.end()
        new = dict[str, str]()
        for line in lines:
            said = message(line)
            traceback = said.startswith(("Traceback", " "))
            if said and not traceback and not NOISE.search(line) and shape(line) not in self._normal:
                new.setdefault(shape(line), said)
        return list(new.values()), [name for name in series if name not in self._normal]

    def why(self, lines: Sequence[str]) -> str:
        """Return what ``kvtier why`` says of the last prompt that was not only to settle.

        Without a cache process, what vLLM's log says.
        """
        if self.socket is None:
            return ""
        with suppress(ChannelError):
            for report in bridge.why(self.socket, last=10).requests:
                if report.tokens >= LENGTH:
                    return "; ".join(map(text_of, report.misses))
        said = [line.partition("missed: ")[2] for line in lines if "missed: " in line]
        return said[-1] if said else ""

    def _logs(self) -> list[Path]:
        return [log for log in (self.system.log, self.system.parts.log) if log is not None and log.exists()]

    def _scrape(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for url in (f"{self.system.client.url}/metrics", self.system.parts.metrics):
            with suppress(httpx.HTTPError):
                for line in self._http.get(url).text.splitlines() if url else ():
                    name, _, value = line.rpartition(" ")
                    if not line.startswith("#") and RELEVANT.search(name) and not NOISE.search(name):
                        found[series(name)] = found.get(series(name), 0.0) + float(value)
        return found


def shape(line: str) -> str:
    """Return a line without what differs each time."""
    return re.sub(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", "#", message(line))


def message(line: str) -> str:
    """Return what a line says, without process, time, place and colour."""
    line = re.sub(r"\x1b\[[\d;]*m", "", line)
    line = re.sub(r"^(\(.*?\) |\[.*?\] )+", "", line)
    line = re.sub(r"^([\d-]+ [\d:,]+ )?(LMCache )?(INFO|WARNING|ERROR):? ?", "", line)
    line = re.sub(r"^(kvtier: |[\d-]+ [\d:,.]+ )?(\[.*?\]:? ?)?", "", line)
    return re.sub(r" ?\(\S+\.py:\d+:\S+\)$", "", line)


def series(name: str) -> str:
    """Return the name of a series with the labels that matter."""
    labels = re.findall(r'(\w+)="([^"]*)"', name)
    kept = ",".join(f"{label}={value}" for label, value in labels if label in LABELS)
    return name.partition("{")[0] + (f"{{{kept}}}" if kept else "")


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the demo's model, with random weights."""
    from safetensors.numpy import save_file

    noise, weights = np.random.default_rng(seed), {}
    values = demo.KV_HEADS * demo.HEAD_SIZE
    for layer in range(LAYERS):
        for name, rows in (("q_proj", demo.HIDDEN), ("v_proj", values)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, of in (("lora_A", (8, demo.HIDDEN)), ("lora_B", (rows, 8))):
                weights[f"{prefix}.{part}.weight"] = (noise.standard_normal(of) * 0.1).astype(np.float32)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


# The faults. Until the first yield, all is well. What is done until the second one is observed. Then, a note.


def date(trial: Trial) -> Iterator[str]:
    """300 tokens of a template, then a date, then the template as before."""
    template = tokens("template", LENGTH)
    trial.store(template)
    yield ""
    trial.ask([*template[:300], 7, 8, 9, *template[303:]])


def salt(trial: Trial) -> Iterator[str]:
    """The same prompt with another `cache_salt`."""
    trial.store(tokens("salt", LENGTH), salt="one")
    yield ""
    trial.ask(tokens("salt", LENGTH), salt="two")


def adapter(trial: Trial) -> Iterator[str]:
    """The same prompt for another LoRA adapter."""
    prompt = tokens("adapter", LENGTH)
    trial.adapter("one", 1)
    trial.adapter("two", 2)
    trial.store(prompt, model="one")
    yield ""
    found = trial.ask(prompt, model="two")
    yield ""
    yield compare(trial.ask(prompt, salt="to compare", model="two"), found)


def adapter_again(trial: Trial) -> Iterator[str]:
    """The adapter's files are replaced, and it is loaded again under its name."""
    prompt = tokens("again", LENGTH)
    trial.adapter("same", 3)
    trial.store(prompt, model="same")
    yield ""
    trial.adapter("same", 4)
    found = trial.ask(prompt, model="same")
    yield ""
    yield compare(trial.ask(prompt, salt="to compare", model="same"), found)


def weights(trial: Trial) -> Iterator[str]:
    """`reload_weights` with others, and `/update_weight_version`."""
    prompt, other = tokens("weights", LENGTH), trial.folder / "other"
    shutil.copytree(trial.folder.parent / "model", other)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(other / "model.safetensors")
    tensors = {name: -value if "o_proj" in name else value for name, value in tensors.items()}
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    trial.post("/update_weight_version", new_version="step-1")
    trial.store(prompt)
    yield ""
    trial.post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(other)})
    trial.post("/reset_prefix_cache")
    trial.post("/update_weight_version", new_version="step-2")
    found = trial.ask(prompt)
    yield ""
    yield compare(trial.ask(prompt, salt="to compare"), found)


def cleared(trial: Trial) -> Iterator[str]:
    """`/reset_prefix_cache?reset_external=true`."""
    trial.store(tokens("cleared", LENGTH))
    yield ""
    trial.post("/reset_prefix_cache?reset_external=true")
    trial.ask(tokens("cleared", LENGTH))


def full(trial: Trial) -> Iterator[str]:
    """The disk has no room (ENOSPC): what memory evicts is gone."""
    yield ""
    trial.disk.set("full")
    trial.store(tokens("full", LENGTH))
    trial.push_out()
    trial.ask(tokens("full", LENGTH))


def hanging(trial: Trial) -> Iterator[str]:
    """Reads of the disk do not return."""
    trial.store(tokens("hanging", LENGTH))
    trial.push_out()
    yield ""
    trial.disk.set("hanging")
    trial.ask(tokens("hanging", LENGTH))


def slow(trial: Trial) -> Iterator[str]:
    """Each read takes 8 s for a MiB, and has done so for three prompts."""
    prompts = [tokens(f"slow {number}", LENGTH) for number in range(4)]
    for prompt in prompts:
        trial.store(prompt)
    trial.push_out()
    trial.disk.set("slow")
    for prompt in prompts[1:]:
        trial.ask(prompt)
        time.sleep(ANSWER_SECONDS / 2)
    yield ""
    trial.ask(prompts[0])


def unreadable(trial: Trial) -> Iterator[str]:
    """Reads of the disk fail (EIO)."""
    trial.store(tokens("unreadable", LENGTH))
    trial.push_out()
    yield ""
    trial.disk.set("unreadable")
    trial.ask(tokens("unreadable", LENGTH))


def corrupt(trial: Trial) -> Iterator[str]:
    """64 KiB in the middle of each file are overwritten."""
    right = trial.store(tokens("corrupt", LENGTH))
    trial.push_out()
    yield ""
    trial.disk.corrupt()
    found = trial.ask(tokens("corrupt", LENGTH))
    yield ""
    yield compare(right, found)


def evicted(trial: Trial) -> Iterator[str]:
    """Memory is too small, without a disk."""
    trial.store(tokens("evicted", LENGTH))
    yield ""
    trial.push_out()
    trial.ask(tokens("evicted", LENGTH))


def declined(trial: Trial) -> Iterator[str]:
    """Memory is full of prompts with a high priority, and one of a low priority comes."""

    def store(seed: str, priority: int) -> None:
        hints = {"kvtier": {"cache": {"priority": priority}}}
        model = str(trial.folder.parent / "model")
        prompt = tokens(seed, LENGTH)
        trial.post("/v1/completions", model=model, prompt=prompt, max_tokens=1, kv_transfer_params=hints)
        trial.settle()

    for number in range(FILLING):
        store(f"worthy {number}", 100)
    yield ""
    store("declined", -100)
    trial.ask(tokens("declined", LENGTH))


def other_blocks(trial: Trial) -> Iterator[str]:
    """The engine is started again with `--block-size 64`, and its cache process goes on."""
    trial.store(tokens("blocks", LENGTH))
    trial.system.parts.arguments += ["--block-size", "64"]
    trial.system.restart(cache=False)
    yield ""
    trial.ask(tokens("blocks", LENGTH))


def killed(trial: Trial) -> Iterator[str]:
    """The cache process is killed."""
    trial.store(tokens("killed", LENGTH))
    yield ""
    trial.system.kill_cache()
    trial.ask(tokens("killed", LENGTH))
    yield ""
    yield "" if trial.system.parts.start else "it has no such process"


def compare(right: Completion | None, answer: Completion | None) -> str:
    wrong = right is not None and answer is not None and right.tokens != answer.tokens
    return "wrong tokens" if wrong else ""


Fault = Callable[[Trial], Iterator[str]]
WITH_DISK: dict[str, Fault] = {
    "date in the template": date,
    "another salt": salt,
    "another adapter": adapter,
    "adapter trained again": adapter_again,
    "hanging disk": hanging,
    "slow disk": slow,
    "unreadable disk": unreadable,
    "corrupted files": corrupt,
    "full disk": full,
    "reset": cleared,
    "other weights": weights,
}
IN_MEMORY: dict[str, Fault] = {
    "memory too small": evicted,
    "declined": declined,
    "another block size": other_blocks,
    "cache process killed": killed,
}
FAULTS = {**WITH_DISK, **IN_MEMORY}
ORDER = (
    *("date in the template", "another salt", "another adapter", "adapter trained again", "other weights"),
    *("another block size", "memory too small", "declined", "reset", "full disk", "hanging disk"),
    *("slow disk", "unreadable disk", "corrupted files", "cache process killed"),
)


class Seen(NamedTuple):
    """What a system has said of a fault."""

    cached: int
    seconds: float
    why: str
    lines: list[str]
    series: list[str]
    note: str

    def cell(self) -> str:
        """Return it in a few words."""
        parts = [self.note] if self.note else []
        parts += [f"after {self.seconds:.0f} s"] if self.seconds > ANSWER_SECONDS / 2 else []
        parts += [f"{self.cached:,} tokens hit"] if self.cached else []
        lines = [re.sub(r"'?/\S*/|\S*[0-9a-f]{24,}", "…", line).replace("|", "/") for line in self.lines]
        parts += [f"log: {line[:SHOWN_CHARACTERS]}" for line in lines[:SHOWN_LINES]]
        more = len(self.lines) - SHOWN_LINES
        parts += [f"{more} more lines"] if more > 0 else []
        parts += [", ".join(self.series[:SHOWN_SERIES])] if self.series else []
        return "; ".join(parts) or "nothing"


def start(name: str, folder: Path, disk: FaultyFolder | None) -> tuple[System, Path | None]:
    """Return a system that is not started, and the socket of kvtier's cache process."""
    folder.mkdir()
    arguments = ["--enable-lora", "--max-lora-rank", "8"] if disk else []
    if name == "kvtier":
        memory = {"name": "ram", "type": "cpu", "capacity": MEMORY_BYTES}
        files = (
            [{"name": "ssd", "type": "disk", "path": str(disk.path), "capacity": DISK_BYTES}] if disk else []
        )
        # The policy that declines what it finds worth less.
        memory |= {} if disk else {"eviction": "resume", "high_watermark": 1.0, "low_watermark": 1.0}
        parts = systems.kvtier(folder, serve=True, settings={"tiers": [memory, *files]})
    elif name == "lmcache":
        where = str(disk.path) if disk else ""
        parts = systems.lmcache(folder, memory=MEMORY_BYTES, disk=where, quiet=False)
    else:
        parts = systems.offload(folder, memory=MEMORY_BYTES, disk="" if disk is None else str(disk.path))
    parts.arguments += arguments
    parts.variables = {**parts.variables, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    return System(name, folder, parts), folder / "socket" if name == "kvtier" else None


def observe(name: str, folder: Path, disk: FaultyFolder | None, faults: dict[str, Fault]) -> dict[str, Seen]:
    """Inject faults into one system, which is started with or without a disk."""
    found: dict[str, Seen] = {}
    system, socket = start(name, folder, disk)
    with ExitStack() as stack:
        stack.callback(system.close)
        system.start()
        trial = Trial(system, folder, disk or FaultyFolder(folder), socket)
        trial.learn()
        for fault, inject in faults.items():
            print(f"{name}: {fault}", file=sys.stderr, flush=True)
            steps = inject(trial)
            next(steps)
            trial.begin()
            next(steps, "")
            lines, series = trial.said()
            asked = [answer for answer in trial.answers if answer is None or answer.prompt_tokens >= LENGTH]
            last, why = asked[-1] if asked else None, trial.why(lines)
            note = next(steps, "") or ("the request failed" if last is None else "")
            cached, seconds = (0, 0.0) if last is None else (last.cached_tokens, last.ttft)
            found[fault] = Seen(cached, seconds, why, lines, series, note)
            print(f"    {found[fault]}", file=sys.stderr, flush=True)
            if disk is not None:
                disk.set("")
            with suppress(httpx.HTTPError):
                trial.settle()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="What do caches say of faults?")
    parser.add_argument("--systems", nargs="+", choices=SIDES, default=SIDES, help="default: all")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=ORDER, help="default: all")
    options = parse(parser, systems=["kvtier"], faults=["date in the template"])
    seen: dict[str, dict[str, Seen]] = {}
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        base = Path(name)
        demo.make_model(base / "model", LAYERS)
        for side in options.systems:
            seen[side] = {}
            for group, faults in (("disk", WITH_DISK), ("memory", IN_MEMORY)):
                wanted = {fault: inject for fault, inject in faults.items() if fault in options.faults}
                with ExitStack() as stack:
                    disk = FaultyFolder(base / f"{side}-files") if group == "disk" else None
                    if disk is not None:
                        stack.enter_context(disk.mounted())
                    if wanted:
                        seen[side] |= observe(side, base / f"{side}-{group}", disk, wanted)
    report(seen, options.faults)


SIDES = ("kvtier", "lmcache", "offload")


def report(seen: dict[str, dict[str, Seen]], faults: Sequence[str]) -> None:
    if "kvtier" in seen:
        rows = [
            (fault, " ".join((FAULTS[fault].__doc__ or "").split()), seen["kvtier"][fault].why)
            for fault in faults
        ]
        show("what kvtier says of each fault", ("fault", "injected", "kvtier why"), rows)
    others = [side for side in seen if side != "kvtier"]
    if others:
        beside = [(fault, *(seen[side][fault].cell() for side in others)) for fault in faults]
        show("what others show besides a miss", ("fault", *others), beside)


if __name__ == "__main__":
    main()
