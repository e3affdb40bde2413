"""Two prefillers and two decoders behind ``kvtier proxy``: real vLLM servers, each with its cache process."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from rich.console import Console

from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import DemoFailed, Server, start_proxy, start_vllm
from kvtier.lab.demo.work import (
    Model,
    Options,
    Steps,
    Work,
    make_prompts,
    served_model,
    vllm_arguments,
    work_folder,
)
from kvtier.testing.servers import free_port
from tests.rigs.cache_process import MIB, CacheProcess
from tests.vllm.test_disaggregated import ROLES, SECRET, is_quiet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS, NEW_TOKENS = 900, 12
PROMPTS = 6
READY_SECONDS = 300.0
SALT = "one engine"
"""With this salt a decoder computes everything itself: it hits nothing that other requests stored."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
SMALL = (
    "--max-num-batched-tokens",
    "512",
    "--kv-cache-memory-bytes",
    "512M",
    "--chat-template",
    CHAT_TEMPLATE,
)
# One thread each: four engines with a thread per core wait for each other more than they compute.
ON_ALL_CORES = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


class Member:
    """One engine and its cache process."""

    def __init__(
        self, work: Work, model: Model, kv_role: str, number: int, listen: str, targets: list[str]
    ) -> None:
        peer = {"listen": listen, "secret": SECRET, "transport": "tcp"}
        folder = work.sockets / f"{kv_role}-{number}"
        folder.mkdir()
        self.cache = CacheProcess(
            folder, ram={"capacity": 512 * MIB}, peer=peer, kv_transfer={"timeout": 240.0, "targets": targets}
        )
        self.cache.start()
        port = free_port()
        config = folder / "kvtier.yaml"
        self.client = Client(port, model.name)
        self.server = start_vllm(
            model.name,
            port=port,
            config=config,
            log=work.log(folder.name),
            max_tokens=4 * TOKENS,
            arguments=[*vllm_arguments(Options()), *SMALL],
            kv_role=kv_role,
            scratch=work.sockets,
            name=folder.name,
            variables={**model.variables, **ON_ALL_CORES},
        )

    def kill(self) -> None:
        self.server.kill()
        self.cache.kill()


class Fleet:
    """All engines, the proxy, and a client of the proxy."""

    def __init__(self, work: Work, model: Model, stack: ExitStack) -> None:
        self._work = work
        self.members: dict[str, list[Member]] = {}
        decoders = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        for kv_role in ROLES:
            self.members[kv_role] = []
            for number, address in enumerate(decoders):
                listen = address if kv_role == "kv_consumer" else f"127.0.0.1:{free_port()}"
                self.members[kv_role].append(Member(work, model, kv_role, number, listen, decoders))
            for member in self.members[kv_role]:
                stack.callback(member.kill)
                stack.enter_context(member.client)
        for member in self.all:
            member.server.wait_until(member.client.healthy, READY_SECONDS)
        self._port = free_port()
        self.proxy = stack.enter_context(Client(self._port, model.name))
        self.start_proxy()
        stack.callback(lambda: self.proxy_server.kill())
        self.prompts = make_prompts(self.decoder, TOKENS, 2 * PROMPTS)

    @property
    def all(self) -> list[Member]:
        return [member for members in self.members.values() for member in members]

    @property
    def decoder(self) -> Client:
        return self.members["kv_consumer"][1].client

    def start_proxy(self) -> None:
        prefillers, decoders = ([member.client.url for member in self.members[role]] for role in ROLES)
        log = self._work.log("proxy")
        self.proxy_server: Server = start_proxy(
            port=self._port,
            prefill=prefillers,
            decode=decoders,
            log=log,
            arguments=["--check", "200ms", "--timeout", "240s"],
        )
        self.proxy_server.wait_until(self.proxy.healthy, READY_SECONDS)
        self.wait_for({"up"})

    def wait_for(self, states: set[str]) -> None:
        def reached() -> bool:
            return {engine["state"] for engine in self.proxy.get("/engines")} == states

        self.proxy_server.wait_until(reached, READY_SECONDS)

    def is_busy(self, member: Member) -> bool:
        """Whether the proxy has a request in flight to this engine."""
        engines = self.proxy.get("/engines")
        return any(engine["load"] for engine in engines if engine["url"] == member.client.url)

    def expected(self, prompt: list[int]) -> list[int]:
        """Return the answer of one engine by itself."""
        return self.decoder.complete(prompt, NEW_TOKENS, salt=SALT).tokens

    def wait_until_quiet(self) -> None:
        """Wait until no cache process holds leases, and nothing is in flight."""
        for member in self.all:
            member.cache.wait_until(is_quiet)


@contextmanager
def running_fleet() -> Iterator[Fleet]:
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder, ExitStack() as stack:
        work = stack.enter_context(work_folder(Options(work_dir=Path(folder))))
        model = stack.enter_context(served_model(Options(), work, Steps(Console(file=io.StringIO()))))
        yield Fleet(work, model, stack)


@pytest.fixture(scope="module")
def running() -> Iterator[Fleet]:
    with running_fleet() as fleet:
        yield fleet


@pytest.fixture
def fleet(running: Fleet) -> Iterator[Fleet]:
    yield running
    running.wait_until_quiet()


def complete_unstreamed(fleet: Fleet, prompt: list[int]) -> list[int]:
    """Return an answer without streaming."""
    request = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    with httpx.Client(base_url=fleet.proxy.url, timeout=600, trust_env=False) as http:
        answer = http.post("/v1/completions", json={**request, "return_token_ids": True}).raise_for_status()
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


async def answer_all(fleet: Fleet, prompts: list[list[int]]) -> list[list[int]]:
    """Answer all prompts concurrently, every second one streamed."""
    answers: list[list[int]] = [[] for _ in prompts]

    async def answer(index: int) -> None:
        if index % 2:
            answers[index] = (await fleet.proxy.stream(prompts[index], NEW_TOKENS)).tokens
        else:
            answers[index] = await anyio.to_thread.run_sync(complete_unstreamed, fleet, prompts[index])

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(answer, index)
    return answers


def test_concurrent_requests_with_and_without_streaming(fleet: Fleet) -> None:
    """The prompts are distinct, except for two."""
    prompts = [*fleet.prompts[:PROMPTS], fleet.prompts[0]]
    before = fleet.proxy.get("/stats")["transferred_tokens"]
    answers = anyio.run(answer_all, fleet, prompts)
    assert answers == [fleet.expected(prompt) for prompt in prompts]
    assert fleet.proxy.get("/stats")["transferred_tokens"] - before >= PROMPTS // 2 * TOKENS
    fleet.wait_until_quiet()
    pushed = [
        member.cache.status()["kv_transfers"]["pushed_bytes"] for member in fleet.members["kv_producer"]
    ]
    assert all(pushed), "both prefillers push"
    held = [member.cache.status()["tiers"][0]["chunks"] for member in fleet.members["kv_consumer"]]
    assert all(held), "both decoders hold chunks"


def chat(client: Client, messages: list[dict[str, str]], **more: Any) -> tuple[str, int]:
    """Return the answer to a conversation, and how many of its tokens were cached."""
    request = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **more}
    with httpx.Client(base_url=client.url, timeout=600, trust_env=False) as http:
        answer = http.post("/v1/chat/completions", json=request).raise_for_status().json()
    cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return answer["choices"][0]["message"]["content"], cached


def test_conversation_of_several_turns(fleet: Fleet) -> None:
    text = " ".join(f"In year {year} the river rose by {year % 7} feet." for year in range(1700, 1760))
    messages: list[dict[str, str]] = [{"role": "system", "content": text}]
    for turn, question in enumerate(("When was it highest?", "And when lowest?", "Why?")):
        messages.append({"role": "user", "content": question})
        answer, cached = chat(fleet.proxy, messages)
        assert answer == chat(fleet.decoder, messages, cache_salt=SALT)[0]
        assert cached or not turn
        messages.append({"role": "assistant", "content": answer})


def test_proxy_restarts_after_a_kill(fleet: Fleet) -> None:
    prompt = fleet.prompts[PROMPTS]

    async def kill_during_the_answer() -> None:
        def kill(count: int) -> None:
            if count == 2:
                fleet.proxy_server.kill()

        with pytest.raises((httpx.HTTPError, json.JSONDecodeError)):
            await fleet.proxy.stream(prompt, 500, on_token=kill)

    anyio.run(kill_during_the_answer)
    fleet.wait_until_quiet()
    fleet.start_proxy()
    assert fleet.proxy.complete(prompt, NEW_TOKENS).tokens == fleet.expected(prompt)


async def kill_during(fleet: Fleet, victim: Member, prompts: list[list[int]]) -> list[list[int] | None]:
    """Kill an engine while it answers. Return the answers, with ``None`` for those that broke off."""
    answers: list[list[int] | None] = [None] * len(prompts)

    async def answer(index: int) -> None:
        with suppress(httpx.HTTPError, DemoFailed):
            answers[index] = (await fleet.proxy.stream(prompts[index], NEW_TOKENS)).tokens

    async with anyio.create_task_group() as tasks:
        for index in range(len(prompts)):
            tasks.start_soon(answer, index)
        while not await anyio.to_thread.run_sync(fleet.is_busy, victim):
            await anyio.sleep(0.01)
        await anyio.to_thread.run_sync(victim.server.kill)
    return answers


@pytest.mark.parametrize("kv_role", ROLES)
def test_kill_of_one_of_two_engines(fleet: Fleet, kv_role: str) -> None:
    """These tests come last: they leave one prefiller and one decoder."""
    first = PROMPTS + 1 + 4 * ROLES.index(kv_role)
    prompts = fleet.prompts[first : first + 4]
    answers = anyio.run(kill_during, fleet, fleet.members[kv_role][0], prompts)
    expected = [fleet.expected(prompt) for prompt in prompts]
    if kv_role == "kv_producer":
        assert answers == expected, "computed by the other prefiller or by the decoders"
    else:
        pairs = zip(answers, expected, strict=True)
        assert all(answer in (None, right) for answer, right in pairs), "broken off, never wrong"
    assert anyio.run(answer_all, fleet, prompts) == expected
