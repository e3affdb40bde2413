"""A real vLLM in its own process, so that a test can kill it, restart it, or run two."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.rigs.forks import forks_with_vllm
from tests.rigs.vllm import engine_process

ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
    "disable_log_stats": False,
    "seed": 0,
}
ANSWER_SECONDS = 240.0
"""Upper bound for any one answer; no assertion depends on it."""


class EngineDied(Exception):
    """The engine's process has exited."""


@dataclass(frozen=True)
class Answer:
    """The result of a request. ``cached`` counts the prompt tokens that were not computed."""

    tokens: list[int]
    cached: int
    reason: str
    params: dict[str, Any] | None = None
    """Its ``kv_transfer_params``."""
    logprobs: list[dict[str, float]] | None = None
    """Per token, if requested: the log-probabilities of the most likely tokens, by token id."""


@dataclass
class Engine:
    """One engine. Every call except :meth:`submit` blocks until it is answered."""

    process: Any
    connection: Any
    log: Path
    block_tokens: int = 0
    """A hit of this engine is a multiple of so many tokens."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _answers: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def open(
        self,
        model: Path | str,
        connector: dict[str, Any] | None,
        *,
        kv_role: str = "kv_both",
        connector_type: dict[str, Any] | None = None,
        hub: dict[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        """Build the engine. ``connector`` holds kvtier's settings, or is ``None`` for vLLM without kvtier.

        ``model`` is a folder, or a name on the hub that ``hub`` describes: its environment variables.

        ``connector_type`` selects another class than kvtier's: its ``kv_connector`` and
        ``kv_connector_module_path``.
        """
        transfer = None
        if connector is not None:
            transfer = {
                "kv_connector_extra_config": connector,
                "kv_role": kv_role,
                **(connector_type or {}),
            }
        arguments = {**ARGUMENTS, "model": str(model), **arguments}
        self.block_tokens = self._call("open", arguments=arguments, connector=transfer, hub=hub)

    def generate(self, tokens: Sequence[int] | str, new: int = 16, **options: Any) -> Answer:
        """Run one request with greedy decoding."""
        return self.answer(self.submit(tokens, new, **options))

    def generate_all(self, prompts: Sequence[Sequence[int]], new: int = 16, **options: Any) -> list[Answer]:
        """Run several requests concurrently."""
        return [self.answer(number) for number in [self.submit(prompt, new, **options) for prompt in prompts]]

    def submit(
        self,
        tokens: Sequence[int] | str,
        new: int = 16,
        *,
        salt: str | None = None,
        lora: dict[str, Any] | None = None,
        params: dict[str, Any] | None = None,
        logprobs: int | None = None,
        trace: str | None = None,
    ) -> int:
        """Send a request, and return the number that :meth:`answer` and :meth:`abort` take.

        ``tokens`` may be text, for an engine with a tokenizer. ``params`` are its ``kv_transfer_params``,
        ``logprobs`` how many of the most likely tokens to report, ``trace`` its header ``traceparent``.
        """
        number = next(self._numbers)
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": new,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": logprobs,
        }
        if params is not None:
            sampling["extra_args"] = {"kv_transfer_params": params}
        prompt = tokens if isinstance(tokens, str) else list(tokens)
        message = {"request": str(number), "tokens": prompt, "sampling": sampling, "trace": trace}
        self._send(number, "generate", **message, salt=salt, lora=lora)
        return number

    def answer(self, number: int) -> Answer:
        return Answer(**self._receive(number))

    def finished(self, number: int) -> bool:
        """Whether a request has been answered."""
        while self.connection.poll(0):
            self._take()
        return number in self._answers

    def hold(self) -> None:
        """Stop stepping until :meth:`step` or :meth:`resume`."""
        self._call("allow", steps=0)

    def step(self) -> None:
        """Take one step, if the scheduler has requests."""
        self._call("allow", steps=1)

    def resume(self) -> None:
        """Resume stepping after :meth:`hold`."""
        self._call("allow", steps=None)

    def abort(self, *numbers: int) -> None:
        self._call("abort", requests=[str(number) for number in numbers])

    def reset_prefix_cache(self, *, external: bool = False) -> None:
        """Clear vLLM's own cache, and kvtier's with ``external``. Waits for blocks that are being freed."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._call("reset", external=external):
            assert time.monotonic() < deadline, "vLLM still holds blocks of finished requests"
            time.sleep(0.02)

    def load_weights(self, model: Path) -> None:
        """Replace the weights by those of another model of the same shape."""
        self._call("load_weights", path=str(model))

    def load_adapter(self, lora: dict[str, Any]) -> None:
        """Load a LoRA adapter as vLLM's API does, given the arguments of its ``LoRARequest``."""
        self._call("load_adapter", lora=lora)

    def name_weights(self, version: str) -> None:
        """Set vLLM's ``weight_version``."""
        self._call("name_weights", version=version)

    def preempt(self) -> None:
        """Preempt every running request, so that each starts again."""
        self._call("reset", external=False, running=True)

    def wait_until_free(self) -> None:
        """Wait until every block of vLLM's pool, except the null block, is free."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while (metrics := self.metrics())["free_blocks"] != metrics["blocks"] - 1:
            assert time.monotonic() < deadline, f"{metrics['free_blocks']} of {metrics['blocks']} blocks free"
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        """Return vLLM's metrics, ``free_blocks``, and the seconds the scheduler ``waited`` for answers."""
        metrics: dict[str, float] = self._call("metrics")
        return metrics

    def workers(self) -> list[int]:
        """Return the process ids of the workers, if they run in their own processes."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        named = [int(pid) for pid in children if b"multiprocessing" not in _command_line(pid)]
        return sorted(named)

    def kill(self, signum: signal.Signals = signal.SIGKILL) -> None:
        """Kill the engine and all its workers, by default without a chance to clean up."""
        shared = self._shared_memory()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signum)
        self.process.join()
        self.connection.close()
        for path in shared:  # vLLM's, which it could not remove
            path.unlink(missing_ok=True)

    def _shared_memory(self) -> set[Path]:
        maps = []
        with contextlib.suppress(OSError):
            maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (self.pid, *self.workers())]
        lines = "".join(maps).splitlines()
        return {Path(line.split()[5]) for line in lines if " /dev/shm/" in line}

    def close(self) -> None:
        """Shut the engine down cleanly."""
        if self.process.is_alive():
            self._call("close")
            self.process.join()

    def tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _call(self, call: str, **message: Any) -> Any:
        number = next(self._numbers)
        self._send(number, call, **message)
        return self._receive(number)

    def _send(self, number: int, call: str, **message: Any) -> None:
        try:
            self.connection.send_bytes(json.dumps({"number": number, "call": call, **message}).encode())
        except OSError as error:
            raise EngineDied(self.tail()) from error

    def _receive(self, number: int) -> Any:
        deadline = time.monotonic() + ANSWER_SECONDS
        while number not in self._answers:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"no answer; the engine's log ends in\n{self.tail()}")
            self._take()
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{answer['error']}; the engine's log ends in\n{self.tail()}")
        return answer["result"]

    def _take(self) -> None:
        try:
            answer = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise EngineDied(self.tail()) from error
        self._answers[answer["number"]] = answer


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


class Engines:
    """Starts engines. One instance serves the whole test session."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started = itertools.count()
        self._context = forks_with_vllm()

    @contextlib.contextmanager
    def engine(
        self,
        model: Path | str,
        connector: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Iterator[Engine]:
        """Run an engine in its own process for the duration of the ``with`` block."""
        engine = self._start()
        try:
            engine.open(model, connector, **arguments)
            yield engine
            engine.close()
        finally:
            engine.kill()

    def _start(self) -> Engine:
        here, there = self._context.Pipe()
        log = self._directory / f"engine-{next(self._started)}.log"
        log.touch()
        process = self._context.Process(target=engine_process.serve, args=(there, str(log)))
        process.start()
        there.close()
        return Engine(process, here, log)
