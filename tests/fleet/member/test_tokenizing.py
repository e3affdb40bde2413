"""Prompts are tokenized like in the engine; helper processes start on demand and end when idle."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import anyio
import pytest

from kvtier.errors import ChannelClosed, ChannelError
from kvtier.fleet.member import tokenizing as tokenizing_module
from kvtier.fleet.member.protocol import Tokenize
from kvtier.fleet.member.served_models import EngineModel, ServedModels, TokenizerSource
from kvtier.fleet.member.tokenizing import Tokenizers
from kvtier.memory.layout import ChunkLayout, GroupLayout
from kvtier.rpc.frames import MAX_FRAME_BYTES
from tests.fleet.member.conftest import Registered
from tests.rigs.waiting import until

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed: it comes with vLLM", allow_module_level=True)
pytestmark = pytest.mark.anyio
END = "<|end|>"
LAYOUT = ChunkLayout(256, (GroupLayout(16, (1024,)),))
TEXTS = [
    "",
    "Hello",
    "  two  spaces\n\nand lines\t",
    "Grüße 你好 🙂 \x00",
    "<|begin|>Hi<|end|>",
    "word " * 5000,
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tokenizer without special tokens, and one that adds a token before and after each prompt."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    plain, special = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("special")
    for folder in (plain, special):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = byte_level
        alphabet = byte_level.alphabet()
        trainer = trainers.BpeTrainer(special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(TEXTS, trainer)
        tokenizer.save(str(folder / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    tokenizer = Tokenizer.from_file(str(special / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|begin|>"])
    tokens = [("<|begin|>", tokenizer.token_to_id("<|begin|>")), (END, 0)]
    single = f"<|begin|> $A {END}"
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=tokens)
    tokenizer.save(str(special / "tokenizer.json"))
    return {"plain": plain, "special": special}


@pytest.fixture
def served(models: dict[str, Path]) -> ServedModels:
    served = ServedModels()
    for number, (name, path) in enumerate(models.items()):
        model = EngineModel([name], TokenizerSource(str(path)))
        served.add(f"engine-{number}", name.encode().ljust(32), LAYOUT, model)
    return served


@pytest.fixture
async def tokenizers(served: ServedModels) -> AsyncIterator[Tokenizers]:
    tokenizers = Tokenizers(served)
    async with tokenizers.open():
        yield tokenizers
    assert not tokenizers.processes


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real helper with a fake tokenizer instead of the library, which takes seconds to import."""
    command = (sys.executable, "-m", "tests.fleet.member.fast_tokenizer")
    monkeypatch.setattr(tokenizing_module, "COMMAND", command)


PLAIN, SPECIAL = (name.ljust(32) for name in (b"plain", b"special"))


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> Callable[[str, str], list[int]]:
    """Tokenize with the library behind transformers."""
    from tokenizers import Tokenizer

    loaded = {name: Tokenizer.from_file(str(path / "tokenizer.json")) for name, path in models.items()}
    return lambda name, text: list(loaded[name].encode(text).ids)


async def test_token_ids_equal_those_of_the_library(
    tokenizers: Tokenizers, expected: Callable[[str, str], list[int]]
) -> None:
    for namespace in (PLAIN, SPECIAL):
        name = namespace.decode().strip()
        for text in TEXTS:
            assert await tokenizers.tokenize(namespace, text) == expected(name, text)
    assert (await tokenizers.tokenize(SPECIAL, "Hello"))[1:-1] == await tokenizers.tokenize(PLAIN, "Hello")
    assert len(tokenizers.processes) == 2


@pytest.mark.usefixtures("fast")
async def test_helper_is_reused_and_ends_when_idle(served: ServedModels) -> None:
    tokenizers = Tokenizers(served, idle=0.2)
    async with tokenizers.open():
        assert await tokenizers.tokenize(PLAIN, "a bcd ef") == [1, 3, 2]
        (process,) = tokenizers.processes
        assert await tokenizers.tokenize(PLAIN, "Hello") == [5]
        assert tokenizers.processes == [process]
        await until(lambda: not tokenizers.processes)
        await until(lambda: not is_running(process))
        assert await tokenizers.tokenize(PLAIN, "Hello") == [5]


@pytest.mark.usefixtures("fast")
async def test_helper_is_not_idle_during_a_request(served: ServedModels) -> None:
    tokenizers = Tokenizers(served, idle=0.01)
    async with tokenizers.open():
        assert await tokenizers.tokenize(PLAIN, "slow") == [4]


@pytest.mark.usefixtures("fast")
async def test_killed_helper_is_restarted(tokenizers: Tokenizers) -> None:
    assert await tokenizers.tokenize(PLAIN, "Hello") == [5]
    (process,) = tokenizers.processes
    os.kill(process, signal.SIGKILL)
    await until(lambda: not is_running(process))
    with suppress(ChannelClosed):  # Its exit may not have been noticed yet.
        await tokenizers.tokenize(PLAIN, "Hello")
    assert await tokenizers.tokenize(PLAIN, "Hello") == [5]
    assert process not in tokenizers.processes


@pytest.mark.usefixtures("fast")
async def test_hanging_helper_is_killed(tokenizers: Tokenizers, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await tokenizers.tokenize(PLAIN, "Hello") == [5]
    (process,) = tokenizers.processes
    os.kill(process, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizing_module, "ANSWER_SECONDS", 0.2)
        with pytest.raises(ChannelClosed, match="did not answer within"):
            await tokenizers.tokenize(PLAIN, "Hello")
    await until(lambda: not is_running(process))
    assert await tokenizers.tokenize(PLAIN, "Hello") == [5]


@pytest.mark.usefixtures("fast")
async def test_cancelled_request_leaves_no_answer_behind(tokenizers: Tokenizers) -> None:
    assert await tokenizers.tokenize(PLAIN, "Hello") == [5]
    os.kill(tokenizers.processes[0], signal.SIGSTOP)
    with anyio.move_on_after(0.05):
        await tokenizers.tokenize(PLAIN, "a cancelled request")
    assert await tokenizers.tokenize(PLAIN, "Hello") == [5]


@pytest.mark.usefixtures("fast")
async def test_too_long_answer_fails_only_its_request(tokenizers: Tokenizers) -> None:
    with pytest.raises(ChannelError, match="is over"):
        await tokenizers.tokenize(PLAIN, "many")
    with pytest.raises(ChannelError, match="is over"):
        await tokenizers.tokenize(PLAIN, "x" * (MAX_FRAME_BYTES + 1))
    assert await tokenizers.tokenize(PLAIN, "Hello") == [5]


@pytest.mark.usefixtures("fast")
async def test_printed_output_is_not_an_answer(tokenizers: Tokenizers) -> None:
    assert await tokenizers.tokenize(PLAIN, "print something") == [5, 9]


@pytest.mark.usefixtures("fast")
async def test_least_recently_used_helper_is_replaced(tokenizers: Tokenizers, served: ServedModels) -> None:
    started: list[int] = []
    for number in (0, 1, 0, 2):
        namespace = bytes([number]) * 32
        served.add("engine", namespace, LAYOUT, EngineModel(["m"], TokenizerSource(f"/m/{number}")))
        assert await tokenizers.tokenize(namespace, "Hello") == [5]
        started += [process for process in tokenizers.processes if process not in started]
    first, _, last = started
    assert set(tokenizers.processes) == {first, last}


async def test_no_helper_starts_without_a_usable_tokenizer(served: ServedModels) -> None:
    served.add("mistral", b"m" * 32, LAYOUT, EngineModel(["mistral"], TokenizerSource("/m", "mistral")))
    served.add("unknown", b"s" * 32, LAYOUT, EngineModel(["unknown"]))
    tokenizers = Tokenizers(served)
    async with tokenizers.open():
        for namespace, reason in (
            (b"m" * 32, "cannot load a tokenizer of mode 'mistral'"),
            (b"s" * 32, "no engine of this instance has reported the location"),
            (b"x" * 32, "no engine of this instance has reported the location"),
        ):
            with pytest.raises(ChannelError, match=reason):
                await tokenizers.tokenize(namespace, "Hello")
        assert not tokenizers.processes
    with pytest.raises(ChannelClosed, match="shutting down"):
        await tokenizers.tokenize(PLAIN, "Hello")


@pytest.mark.usefixtures("fast")
async def test_missing_tokenizer_is_reported(served: ServedModels, tmp_path: Path) -> None:
    source = TokenizerSource(str(tmp_path / "nowhere"))
    served.add("broken", b"b" * 32, LAYOUT, EngineModel(["broken"], source))
    tokenizers = Tokenizers(served)
    async with tokenizers.open():
        with pytest.raises(ChannelError, match="the tokenizer failed: FileNotFoundError"):
            await tokenizers.tokenize(b"b" * 32, "Hello")
        await until(lambda: not tokenizers.processes)


@pytest.mark.usefixtures("fast")
async def test_tokenize_command_returns_tokens(registered: Registered) -> None:
    async with registered() as (conversation, one):
        one.instance.served.add("engine", PLAIN, LAYOUT, EngineModel(["m"], TokenizerSource("/models/m")))
        done = await conversation.done(lambda ticket: Tokenize(ticket, PLAIN, "Hello world you"))
        assert (done.tokens, done.keys, done.chunks, done.reason) == ([5, 5, 3], b"", 0, None)
        assert "is over" in await conversation.failed(lambda ticket: Tokenize(ticket, PLAIN, "many"))


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
