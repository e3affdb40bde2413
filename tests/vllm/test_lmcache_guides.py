"""LMCache's guides with kvtier underneath: their files translated, their commands and requests as they are.

Changed for this machine are ports, sizes of memory, the model behind the name, ``cuda``, and what needs RDMA.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from kvtier.lab.demo import model as demo_model
from kvtier.lab.demo.server import Server, start_proxy, start_vllm
from kvtier.lab.demo.work import GENERATED_MODEL_ARGUMENTS
from kvtier.testing.servers import free_port
from tests.rigs.controller_process import ControllerProcess
from tests.rigs.lmcache_guides import (
    CPU_OFFLOAD,
    CPU_OFFLOAD_SERVE,
    CPU_OFFLOAD_VARIABLES,
    EXPLAIN,
    FIRST,
    FUTURE,
    INFINISTORE,
    INFINISTORE_SERVE,
    INSTANCE_1,
    INSTANCE_2,
    MOVE,
    MOVE_SERVE_1,
    MOVE_SERVE_2,
    SECOND,
    STORY,
    TOKENIZE,
    Disaggregated,
)
from tests.rigs.servers.infinistore import InfiniStoreServer
from tests.rigs.waiting import wait_until
from tests.vllm.conftest import SECRET, Oracle

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

READY_SECONDS = 300.0
NEW_TOKENS = 16
PORTS = re.compile(r"\b(?:55555|12345|71\d\d|72\d\d|73\d\d|74\d\d|75\d\d|8[0-5]0[0-9]|9[01]00)\b")
"""Those of all guides."""
TOKENS = re.compile(r'"tokens": \[.*\]')
FLAG = re.compile(r"--kv-transfer-config '(.*)'")
"""In the output of ``from-lmcache``."""
LONG = demo_model.prompt_text()[:8000]
HUGE_PAGE_COUNTS = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
HUGE_PAGES = 130
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"

ARGUMENTS = ("--dtype", "float32", "--chat-template", CHAT_TEMPLATE, *GENERATED_MODEL_ARGUMENTS)

Edit = Callable[[dict[str, Any]], None]


class Answer(NamedTuple):
    """A generated text."""

    tokens: list[int]
    prompt_tokens: int
    cached: int


class Engine:
    """A vLLM server that a guide has started."""

    def __init__(self, server: Server, port: int, name: str, log: Path) -> None:
        self.server = server
        self.log = log
        self._name = name
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300.0, trust_env=False)

    def wait_until_ready(self) -> None:
        self.server.wait_until(self._is_healthy, READY_SECONDS)

    def kill(self) -> None:
        self.server.kill()
        self._http.close()

    def reset_prefix_cache(self) -> None:
        """Empty vLLM's own cache, which is larger here than what a guide asks about."""
        self._http.post("/reset_prefix_cache").raise_for_status()

    def tokenize(self, prompt: str) -> list[int]:
        answer = self._http.post("/tokenize", json={"model": self._name, "prompt": prompt}).raise_for_status()
        tokens: list[int] = answer.json()["tokens"]
        return tokens

    def ask(self, prompt: str, path: str = "/v1/completions") -> Answer:
        return ask(self._http, self._name, prompt, path)

    def ask_until_hit(self, prompt: str, expected: list[int], path: str = "/v1/completions") -> None:
        """Ask until all of the prompt is a hit: an engine does not wait for a busy cache process."""

        def is_hit() -> bool:
            self.reset_prefix_cache()
            answer = self.ask(prompt, path)
            assert answer.tokens == expected
            return answer.cached >= answer.prompt_tokens - 1

        wait_until(is_hit)

    def _is_healthy(self) -> bool:
        try:
            return self._http.get("/health").is_success
        except httpx.HTTPError:
            return False


def ask(http: httpx.Client, name: str, prompt: str, path: str = "/v1/completions") -> Answer:
    content: dict[str, Any] = {"prompt": prompt}
    if "chat" in path:
        content = {"messages": [{"role": "user", "content": prompt}]}
    body = {"model": name, **content, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = http.post(path, json={**body, "return_token_ids": True}).raise_for_status().json()
    usage = answer["usage"]
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
    return Answer(answer["choices"][0]["token_ids"], usage["prompt_tokens"], cached)


class Guide:
    """Does what a reader of a guide does."""

    def __init__(self, folder: Path, model: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._model = model
        self._stack = stack
        self._ports: dict[str, int] = {}
        self._flags: dict[str, str] = {}

    def with_ports(self, text: str) -> str:
        """Return what a guide says with free ports in place of its own, each everywhere with the same."""
        return PORTS.sub(lambda found: str(self.port(found[0])), text)

    def port(self, number: str) -> int:
        return self._ports.setdefault(number, free_port())

    def set_port(self, number: str, port: int) -> None:
        self._ports[number] = port

    def translate(self, name: str, text: str, edit: Edit | None = None) -> None:
        """Write LMCache's file, and the one for kvtier in its place. ``edit`` does what that asks for."""
        theirs = self._folder / f"lmcache-{name}"
        theirs.write_text(self.with_ports(text.replace("cuda", "cpu")))
        output = self.kvtier("config", "from-lmcache", str(theirs))
        flag = FLAG.search(output)
        assert flag is not None
        self._flags[name] = flag[1]
        settings = yaml.safe_load(self.with_ports(output))
        if settings["tiers"][0]["capacity"] == "5GiB":
            settings["tiers"][0]["capacity"] = "256MiB"
        if edit is not None:
            edit(settings)
        (self._folder / name).write_text(yaml.safe_dump(settings, sort_keys=False))

    def kvtier(self, *arguments: str, **variables: str) -> str:
        """Run a command, and return its output."""
        completed = subprocess.run(
            [sys.executable, "-m", "kvtier", *arguments],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (completed.returncode, completed.stderr) == (0, "")
        return completed.stdout

    def serve(self, command: str) -> Engine:
        """Start the vLLM of a command, with kvtier's file and the flag that was printed with it."""
        words = shlex.split(self.with_ports(command.replace("\\\n", " ")))
        start = words.index("vllm")
        variables = dict(word.split("=", 1) for word in words[:start])
        name, arguments = words[start + 2], words[start + 3 :]
        config = variables.pop("LMCACHE_CONFIG_FILE")
        if variables.get("UCX_TLS") == "rc":
            del variables["UCX_TLS"]  # RDMA only.
        if "--disable-log-requests" in arguments:
            arguments.remove("--disable-log-requests")  # vLLM 0.32 does not have it.
        flag = arguments.index("--kv-transfer-config") + 1
        assert json.loads(arguments[flag])["kv_role"] == json.loads(self._flags[config])["kv_role"]
        arguments[flag] = self._flags[config]
        port = int(arguments[arguments.index("--port") + 1]) if "--port" in arguments else self.port("8000")
        log = self._folder / f"{config}.log"
        server = start_vllm(
            str(self._model),
            port=port,
            config=self._folder / config,
            log=log,
            max_tokens=16384,
            arguments=[*arguments, "--served-model-name", name, *ARGUMENTS],
            scratch=self._folder,
            name=config,
            variables=variables,
        )
        engine = Engine(server, port, name, log)
        self._stack.callback(engine.kill)
        return engine

    def proxy(self, command: str) -> Server:
        """Start the proxy, with its addresses in place of the script's."""
        words = shlex.split(self.with_ports(command.replace("\\\n", " ")))
        options = dict(zip(words[2::2], words[3::2], strict=True))
        urls = [
            f"http://{options[f'--{kind}-host']}:{options[f'--{kind}-port']}"
            for kind in ("prefiller", "decoder")
        ]
        log = self._folder / "proxy.log"
        server = start_proxy(port=int(options["--port"]), prefill=urls[:1], decode=urls[1:], log=log)
        self._stack.callback(server.kill)
        return server

    def curl(self, command: str, tokens: list[int] | None = None) -> Any:
        """Run a request of a guide, and return the answer. ``tokens``: ids of this machine's tokenizer."""
        text = self.with_ports(command.replace("\\\n", " "))
        words = shlex.split(text if tokens is None else TOKENS.sub(f'"tokens": {tokens}', text))
        completed = subprocess.run(
            [words[0], "-s", "--noproxy", "*", *words[1:]], capture_output=True, text=True, check=True
        )
        return json.loads(completed.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    demo_model.make_model(folder, layers=2)
    return folder


@pytest.fixture
def guide(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guide]:
    monkeypatch.setenv("PEER_SECRET", SECRET)
    for name in [name for name in os.environ if name.startswith(("LMCACHE_", "KVTIER_"))]:
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder, ExitStack() as stack:
        yield Guide(Path(folder), model, stack)


def expected_answer(engine: Engine, oracle: Oracle, model: Path) -> list[int]:
    """Return what vLLM without kvtier generates."""
    return oracle(model, engine.tokenize(LONG), NEW_TOKENS)


@pytest.fixture
def huge_pages() -> Iterator[None]:
    """Reserve as many as the memory of an instance needs."""
    count = HUGE_PAGE_COUNTS / "nr_hugepages"
    try:
        before = int(count.read_text())
        count.write_text(str(before + HUGE_PAGES))
    except OSError as error:
        pytest.skip(f"cannot set the number of huge pages: {error}")
    yield
    count.write_text(str(before))


def test_cpu_offload_on_huge_pages(guide: Guide, model: Path, oracle: Oracle, huge_pages: None) -> None:
    free = HUGE_PAGE_COUNTS / "free_hugepages"
    before = int(free.read_text())
    if before < HUGE_PAGES:
        pytest.skip(f"the system has {before} free huge pages")
    guide.translate("cpu-offload.yaml", f"{CPU_OFFLOAD}local_cpu_use_hugepages: true\n")
    engine = guide.serve(CPU_OFFLOAD_SERVE)
    engine.wait_until_ready()
    expected = expected_answer(engine, oracle, model)
    assert engine.ask(LONG).tokens == expected
    engine.ask_until_hit(LONG, expected)
    assert int(free.read_text()) < before


def test_cpu_offload(guide: Guide, model: Path, oracle: Oracle) -> None:
    guide.translate("cpu-offload.yaml", CPU_OFFLOAD)
    from_variables = yaml.safe_load(guide.kvtier("config", "from-lmcache", "--env", **CPU_OFFLOAD_VARIABLES))
    ram = {"name": "ram", "type": "cpu", "capacity": "5GiB"}
    assert from_variables == {"tiers": [ram], "chunk_tokens": 256}
    engine = guide.serve(CPU_OFFLOAD_SERVE)
    engine.wait_until_ready()
    question = f"{LONG}\n\nSummarize bash in 2 sentences."
    cold = engine.ask(question, "/v1/chat/completions")
    assert cold.cached == 0
    assert cold.tokens == oracle(model, engine.tokenize(f"{question}\n"), NEW_TOKENS)
    engine.ask_until_hit(question, cold.tokens, "/v1/chat/completions")


@pytest.mark.parametrize("texts", [FIRST, SECOND], ids=["English", "Chinese"])
def test_disaggregated_prefill(guide: Guide, model: Path, oracle: Oracle, texts: Disaggregated) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    guide.translate("lmcache-decoder-config.yaml", texts.decoder)

    def name_target(settings: dict[str, Any]) -> None:
        if texts.target is not None:
            settings["kv_transfer"]["targets"] = [guide.with_ports(texts.target)]

    guide.translate("lmcache-prefiller-config.yaml", texts.prefiller, name_target)
    decoder, prefiller = guide.serve(texts.serve_decoder), guide.serve(texts.serve_prefiller)
    for engine in (decoder, prefiller):
        engine.wait_until_ready()
    proxy = guide.proxy(texts.proxy)
    guide.set_port("9000", guide.port(texts.request_port))
    url = f"http://127.0.0.1:{guide.port('9000')}"
    with httpx.Client(base_url=url, timeout=300.0, trust_env=False) as http:
        proxy.wait_until(lambda: is_ready(http), READY_SECONDS)
        assert guide.curl(STORY)["choices"][0]["finish_reason"] in ("length", "stop")
        expected = expected_answer(decoder, oracle, model)
        answer = ask(http, "meta-llama/Llama-3.1-8B-Instruct", LONG)
        assert answer.tokens == expected
        assert answer.cached >= answer.prompt_tokens - 1, "transferred"
        again = ask(http, "meta-llama/Llama-3.1-8B-Instruct", LONG)
        assert (again.tokens, again.cached) == (expected, answer.cached)
    assert f"{answer.prompt_tokens} of {answer.prompt_tokens} tokens transferred" in prefiller.log.read_text()


def is_ready(proxy: httpx.Client) -> bool:
    """Whether the proxy reaches both engines."""
    try:
        health = proxy.get("/health").json()
    except (httpx.HTTPError, ValueError):
        return False
    return health.get("prefill") == health.get("decode") == 1


def without_rdma(settings: dict[str, Any]) -> None:
    pool = settings["tiers"][1]
    assert (pool["connection"], pool["device"]) == ("rdma", "mlx5_1")
    pool["connection"] = "tcp"


def test_infinistore(guide: Guide, model: Path, oracle: Oracle, tmp_path: Path) -> None:
    if reason := InfiniStoreServer.missing():
        pytest.skip(reason)
    with InfiniStoreServer(tmp_path) as infinistore:
        guide.set_port("12345", infinistore.port)
        guide.translate("infinistore-config.yaml", INFINISTORE, without_rdma)
        engine = guide.serve(INFINISTORE_SERVE)
        engine.wait_until_ready()
        assert guide.curl(FUTURE)["choices"][0]["finish_reason"] in ("length", "stop")
        expected = expected_answer(engine, oracle, model)
        assert engine.ask(LONG).tokens == expected
        engine.ask_until_hit(LONG, expected)
        engine.kill()
        engine = guide.serve(INFINISTORE_SERVE)
        engine.wait_until_ready()
        answer = engine.ask(LONG)
        assert answer.tokens == expected
        assert answer.cached > answer.prompt_tokens - 257, "whole chunks, from InfiniStore"


@pytest.fixture
def controller(guide: Guide, tmp_path: Path) -> Iterator[ControllerProcess]:
    controller = ControllerProcess(tmp_path)
    guide.set_port("9000", int(controller.url.rpartition(":")[2]))
    controller.start()
    yield controller
    controller.close()


def rename(settings: dict[str, Any]) -> None:
    assert settings["controller"]["instance_id"] == "lmcache_instance_1"
    settings["controller"]["instance_id"] = "lmcache_instance_2"


def test_move_kv_cache(guide: Guide, controller: ControllerProcess, model: Path, oracle: Oracle) -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")
    guide.translate("instance1.yaml", INSTANCE_1)
    guide.translate("instance2.yaml", INSTANCE_2, rename)
    first, second = guide.serve(MOVE_SERVE_1), guide.serve(MOVE_SERVE_2)
    for engine in (first, second):
        engine.wait_until_ready()
    controller.wait_until_registered("lmcache_instance_1", "lmcache_instance_2")
    tokens = guide.curl(TOKENIZE)["tokens"]

    def is_held() -> bool:
        first.reset_prefix_cache()
        assert guide.curl(EXPLAIN)["usage"]["completion_tokens"] <= 10
        return controller.lookup(tokens) == {"lmcache_instance_1": {"ram": len(tokens)}}

    controller.wait_until(is_held)
    moved = guide.curl(MOVE, tokens)
    assert moved == {"num_tokens": len(tokens), "event_id": moved["event_id"]}
    assert controller.wait_for_end(moved)["state"] == "done"
    assert controller.lookup(tokens) == {"lmcache_instance_2": {"ram": len(tokens)}}
    answer = second.ask("Explain the significance of KV cache in language models.")
    assert answer.tokens == oracle(model, tokens, NEW_TOKENS)
    assert answer.cached >= len(tokens) - 1
