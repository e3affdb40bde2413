"""The endings of tool calls and of turns, as real chat templates have models write them.

What counts is what the model generates: the difference between a conversation with and without its answer,
up to the token that stops it. The tokenizers of Mistral are those of ``mistral_common``, with its templates.
The other templates write messages as those of the named models do (see ``examples/tool_chat_template_*`` of
vLLM, and ``chat_template.jinja`` of Llama 3.1, gpt-oss and GLM 4.5), and have a small tokenizer with the
special tokens of those. With ``pytest -s``, the rates are printed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from random import Random
from typing import Any, NamedTuple

import pytest

from kvtier.catalog.endings import SIGNED_TOKENS, SOON_SECONDS, Endings, signature

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

KEY = bytes(range(32))
LEARNED, NEW = 400, 200
"""Endings of each kind to learn from, and to distinguish then."""

Message = dict[str, Any]


class Template(NamedTuple):
    jinja: str
    stops: tuple[str, ...]
    """The tokens at which the engine stops."""
    special: tuple[str, ...] = ()
    """Other parts of the template that are one token each."""


CHATML = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

QWEN_CODER = """{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}
<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def llama(call: str, stop: str) -> str:
    """The template of Llama 3.1, with two forms of tool calls."""
    return (
        """{%- macro start(role) %}{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}{% endmacro %}
{{- '<|begin_of_text|>' }}
{%- for m in messages %}{{ start('ipython' if m.role == 'tool' else m.role) }}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}"""
        + f"{call}{{{{ '{stop}' }}}}"
        + """{% else %}{{ m.content + '<|eot_id|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ start('assistant') }}{% endif %}"""
    )


LLAMA_BUILTIN = llama(
    "{{ '<|python_tag|>' + f.name + '.call(' }}{% for n, v in f.arguments | items %}"
    "{{ n + '=' + v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}{{ ')' }}",
    "<|eom_id|>",
)
LLAMA_JSON = llama(
    """{{ '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}""", "<|eot_id|>"
)
LLAMA_PYTHONIC = llama(
    "{{ '[' + f.name + '(' }}{% for n, v in f.arguments | items %}"
    "{{ n + '=' + v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %}{{ ')]' }}",
    "<|eot_id|>",
)

DEEPSEEK = """{{ '<[begin of sentence]>' }}
{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<[User]>' + m.content }}
{%- elif m.role == 'tool' %}{{ '<[tool output begin]>' + m.content + '<[tool output end]>' }}
{%- else %}{{ '<[Assistant]></think>' + (m.content or '') }}
{%- if m.tool_calls %}{{ '<[tool calls begin]>' }}{% for call in m.tool_calls %}
{{- '<[tool call begin]>' + call.function.name + '<[tool sep]>' }}
{{- call.function.arguments | tojson + '<[tool call end]>' }}
{%- endfor %}{{ '<[tool calls end]>' }}{% endif %}{{ '<[end of sentence]>' }}
{%- endif %}{% endfor %}{% if add_generation_prompt %}{{ '<[Assistant]></think>' }}{% endif %}"""
"""Its special tokens have other bars and spaces than here."""

# The end of a turn is written another way once the next one follows.
GPT_OSS = """{%- for m in messages %}
{%- if m.tool_calls %}{% set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson + '<|call|>' }}
{%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}
{{- '<|return|>' if loop.last else '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# A message has no end of its own: the model stops with the role that is to follow.
GLM = """{%- for m in messages %}{{ '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' }}
{{ '<tool_response>\n' + m.content + '\n</tool_response>' if m.role == 'tool' else m.content or '' }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{%- for name, value in call.function.arguments | items %}
<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{%- endfor %}
</tool_call>
{%- endfor %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""

EOT = ("<|eot_id|>", "<|eom_id|>")
LLAMA_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
TOOL_CALL = ("<tool_call>", "</tool_call>")
TEMPLATES = {
    "Qwen 2.5 and 3, Hermes": Template(CHATML, ("<|im_end|>",), ("<|im_start|>", *TOOL_CALL)),
    "Hermes form, no tokens for it": Template(CHATML, ("<|im_end|>",), ("<|im_start|>",)),
    "Qwen 3 Coder": Template(QWEN_CODER, ("<|im_end|>",), ("<|im_start|>", *TOOL_CALL)),
    "Llama 3.1, built-in tools": Template(LLAMA_BUILTIN, EOT, LLAMA_SPECIAL),
    "Llama 3.1, tools as JSON": Template(LLAMA_JSON, EOT, LLAMA_SPECIAL),
    "Llama 3.2 and 4, pythonic": Template(LLAMA_PYTHONIC, EOT, LLAMA_SPECIAL),
    "DeepSeek V3.1": Template(
        DEEPSEEK,
        ("<[end of sentence]>",),
        (
            *("<[begin of sentence]>", "<[User]>", "<[Assistant]>", "</think>", "<[tool sep]>"),
            *("<[tool calls begin]>", "<[tool calls end]>", "<[tool call begin]>", "<[tool call end]>"),
        ),
    ),
    "gpt-oss": Template(
        GPT_OSS,
        ("<|return|>", "<|call|>"),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    ),
    "GLM 4.5": Template(GLM, ("<|observation|>", "<|user|>"), ("<|assistant|>", *TOOL_CALL)),
}
MISTRAL = {"Mistral v2": "v2", "Mistral v3": "v3", "Mistral Nemo (tekken)": "tekken", "Mistral v7": "v7"}


class Texts:
    """Varied answers: paragraphs and examples of Python's help, and arguments of tools."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def turn(self) -> str:
        """Most end with a full stop, others with whatever users are shown."""
        pick, paragraphs = self._random, texts()
        text = pick.choice(paragraphs)
        return pick.choices(
            (
                text,
                f"{text} Shall I go on?",
                f"{text}\n\n```python\n{pick.choice(paragraphs).strip()}\n```",
                f"- {self._word()}\n- {self._word()}",
                f"**{self._word()}**",
                f"{text} ({self._word()})",
                f"`{self._word()}`",
                f"{text} {pick.randrange(1000)}",
                f'{{"{self._word()}": "{self._word()}"}}',
            ),
            (70, 8, 8, 4, 2, 2, 2, 2, 2),
        )[0]

    def arguments(self) -> Message:
        return {self._word().lower(): self._value() for _ in range(self._random.randint(1, 4))}

    def name(self) -> str:
        return self._random.choice(("read_file", "run", "search", "get_weather", "edit", "list_files"))

    def _word(self) -> str:
        return self._random.choice(self._random.choice(texts()).split()).strip("\"'`.,:;()[]{}*\\") or "x"

    def _value(self) -> object:
        pick = self._random
        kind = pick.choices(("text", "path", "number", "flag", "list", "object"), (4, 3, 2, 1, 1, 1))[0]
        match kind:
            case "text":
                return pick.choice(texts())[: pick.randint(5, 200)]
            case "path":
                return f"src/{self._word()}/{self._word()}.{pick.choice(('py', 'txt', 'md'))}"
            case "number":
                return pick.choice((pick.randrange(10_000), round(pick.random() * 100, 2)))
            case "flag":
                return pick.choice((True, False))
            case "list":
                return [self._word() for _ in range(pick.randint(0, 3))]
        return {self._word(): self._word()}


@cache
def texts() -> list[str]:
    from pydoc_data.topics import topics

    parts = [part.strip() for _, topic in sorted(topics.items()) for part in topic.split("\n\n")]
    return [part for part in parts if len(part) > 40]


@cache
def trained() -> str:
    """A tokenizer of byte pairs that splits words and punctuation as those of the models do."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    split = pre_tokenizers.Split(pattern, "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=6000, initial_alphabet=alphabet, show_progress=False)
    some = Texts(1)
    calls = [json.dumps({"name": some.name(), "arguments": some.arguments()}) for _ in range(1000)]
    tokenizer.train_from_iterator([*texts(), *calls], trainer)
    return str(tokenizer.to_str())


def call_message(name: str, arguments: Message) -> Message:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


Answer = Callable[[Message], list[int]]
"""Returns the tokens that a model generates for a message."""


def of_template(template: Template) -> Answer:
    from tokenizers import AddedToken, Tokenizer
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = Tokenizer.from_str(trained())
    special = [AddedToken(token, special=True) for token in (*template.stops, *template.special)]
    tokenizer.add_special_tokens(special)
    stops = {tokenizer.token_to_id(token) for token in template.stops}

    def render(messages: list[Message], prompt: bool = False) -> str:
        rendered, _ = render_jinja_template(
            [messages], chat_template=template.jinja, add_generation_prompt=prompt
        )
        return str(rendered[0])

    def answer(message: Message) -> list[int]:
        asked = [{"role": "user", "content": "Please continue."}]
        follows = {"role": "tool" if "tool_calls" in message else "user", "content": "Go on."}
        before = render(asked, prompt=True)
        for whole in (render([*asked, message]), render([*asked, message, follows])):
            assert whole.startswith(before)
            tokens = tokenizer.encode(whole[len(before) :], add_special_tokens=False).ids
            for at, token in enumerate(tokens):
                if token in stops:
                    return list(tokens[: at + 1])
        raise AssertionError("the answer does not end")

    return answer


def of_mistral(version: str) -> Answer:
    """The real tokenizers: what follows the user's message, up to the end of the sentence."""
    pytest.importorskip("mistral_common")
    from mistral_common.protocol.instruct.messages import AssistantMessage
    from mistral_common.protocol.instruct.tool_calls import FunctionCall, ToolCall
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    tekken = version == "tekken"
    tokenizer = MistralTokenizer.v3(is_tekken=True) if tekken else getattr(MistralTokenizer, version)()
    instruct = tokenizer.instruct_tokenizer

    def answer(message: Message) -> list[int]:
        calls = [
            ToolCall(
                function=FunctionCall(
                    name=call["function"]["name"],
                    arguments=json.dumps(call["function"]["arguments"], ensure_ascii=False),
                )
            )
            for call in message.get("tool_calls", ())
        ]
        said = AssistantMessage(tool_calls=calls) if calls else AssistantMessage(content=message["content"])
        tokens: list[int] = instruct.encode_assistant_message(said, False)
        assert tokens[-1] == instruct.tokenizer.eos_id
        return tokens

    return answer


class Samples(NamedTuple):
    """The last tokens of answers."""

    calls: list[list[int]]
    turns: list[list[int]]


def samples(answer: Answer, count: int, seed: int) -> Samples:
    some = Texts(seed)
    return Samples(
        [answer(call_message(some.name(), some.arguments()))[-SIGNED_TOKENS:] for _ in range(count)],
        [answer({"role": "assistant", "content": some.turn()})[-SIGNED_TOKENS:] for _ in range(count)],
    )


def learned(seen: Samples, tokens: int) -> Endings:
    """Have a table see these answers, one every two seconds, and the prompts that come back."""
    random, endings = Random(5), Endings()
    returns: list[tuple[float, int, float]] = []

    def advance(now: float) -> None:
        while returns and returns[0][0] <= now:
            at, slot, gap = heappop(returns)
            endings.returned(slot, gap, at)

    kinds = [(True, call) for call in seen.calls] + [(False, turn) for turn in seen.turns]
    random.shuffle(kinds)
    now = 0.0
    for is_call, last in kinds:
        now += 2.0
        advance(now)
        slot = endings.answer_ended(suffix(last, tokens), now)
        gap = random.uniform(3, 20) if is_call else random.uniform(SOON_SECONDS + 1, 3000)
        heappush(returns, (now + gap, slot, gap))
    advance(now + 10_000)
    endings.answer_ended(suffix([], 0), now + 10_000)  # Counts all others.
    return endings


def suffix(last: list[int], tokens: int) -> tuple[int, ...]:
    return signature(KEY, "stop", last)[: tokens + 1]


class Result(NamedTuple):
    """New tool calls and new turns."""

    call_rates: list[float]
    turn_rates: list[float]
    call_classes: list[int]
    turn_classes: list[int]

    @property
    def separated(self) -> float:
        """The part of pairs in which the tool call is expected sooner than the turn, by class."""
        pairs = [call < turn for call in self.call_classes for turn in self.turn_classes]
        return sum(pairs) / len(pairs)


def judge(endings: Endings, new: Samples, tokens: int) -> Result:
    slots = [
        [endings.answer_ended(suffix(last, tokens), 20_000.0) for last in kind]
        for kind in (new.calls, new.turns)
    ]
    rates = [[endings.rate(slot) for slot in kind] for kind in slots]
    classes = [[endings.ending(slot) for slot in kind] for kind in slots]
    return Result(*rates, *classes)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.fixture(scope="module", autouse=True)
def header() -> None:
    print(f"\n\n{'':32}" + "".join(f"{f'{tokens} tokens':>22}" for tokens in range(SIGNED_TOKENS + 1)))
    print(f"{'':32}" + f"{'calls turns separated':>22}" * (SIGNED_TOKENS + 1))


@pytest.mark.parametrize("name", [*TEMPLATES, *MISTRAL])
def test_tool_call_is_expected_sooner_than_turn(name: str) -> None:
    answer = of_template(TEMPLATES[name]) if name in TEMPLATES else of_mistral(MISTRAL[name])
    seen, new = samples(answer, LEARNED, seed=2), samples(answer, NEW, seed=3)
    results = [judge(learned(seen, tokens), new, tokens) for tokens in range(SIGNED_TOKENS + 1)]
    columns = [
        f"{mean(result.call_rates):10.2f}{mean(result.turn_rates):6.2f}{result.separated:6.0%}"
        for result in results
    ]
    print(f"\n{name:32}" + "".join(columns), end="")
    assert results[0].separated == 0.0, "how it ended is the same"
    assert results[-1].separated > 0.95
    assert mean(results[-1].call_rates) - mean(results[-1].turn_rates) > 0.7
