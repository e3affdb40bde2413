"""What chat templates insert, found by rendering them at different times. Their forms are those of models."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.fleet.member.chat_template import EVERY_REQUEST, Insertion, find_insertion

transformers = pytest.importorskip("transformers")

MESSAGES = "{%- for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{%- endfor %}"
GENERATION = "{%- if add_generation_prompt %}<|assistant|>{% endif %}"
CHAT = MESSAGES + GENERATION
LLAMA = (
    """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
"""
    + CHAT
)
GPT_OSS = (
    """{%- macro build_system_message() -%}
    {{- "Knowledge cutoff: 2024-06\\n" }}
    {{- "Current date: " + strftime_now("%Y-%m-%d") + "\\n\\n" }}
{%- endmacro -%}
{{- "<|start|>system<|message|>" }}{{- build_system_message() }}
"""
    + CHAT
)
MISTRAL = """{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system_message = "The current date is " + today + "." %}
{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set system_message = default_system_message %}
{%- set loop_messages = messages %}{%- endif %}
{{- "[SYSTEM_PROMPT]" + system_message + "[/SYSTEM_PROMPT]" }}
{%- for message in loop_messages %}
{%- if message["role"] == "user" %}{{- "[INST]" + message["content"] + "[/INST]" }}
{%- else %}{{- raise_exception("only user roles") }}{%- endif %}{%- endfor %}"""
SMOL = (
    """{%- set today = strftime_now("%d %B %Y") -%}
{{- "<|im_start|>system\\n## Metadata\\n\\nToday Date: " ~ today ~ "\\n" -}}
"""
    + CHAT
)
GENERATING = (
    '{{ "Now: " + strftime_now("%H:%M:%S") }}{% for m in messages %}{% generation %}{{ m.content }}'
    "{% endgeneration %}{% continue %}{% endfor %}"
)


def save(folder: Path, template: object, name: str = "tokenizer_config.json") -> Path:
    content = template if name.endswith(".jinja") else json.dumps({"chat_template": template})
    (folder / name).write_text(str(content))
    return folder


@pytest.mark.parametrize(
    ("template", "period", "before", "variable"),
    [
        (LLAMA, "every day", "Today Date: ", "date_string"),
        (GPT_OSS, "every day", "Current date: 2026-01-", ""),
        (MISTRAL, "every day", "The current date is 2026-01-", ""),
        (SMOL, "every day", "Today Date: ", ""),
        ('{{ "It is " + strftime_now("%H:%M") }}' + CHAT, "every minute", "It is 10:2", ""),
        ('{{ "It is " + strftime_now("%H h") }}' + CHAT, "every hour", "It is 1", ""),
        (GENERATING, "every second", "Now: 10:20:3", ""),
        ("{{ ['Hi', 'Hello', 'Good day'] | random }}" + CHAT, EVERY_REQUEST, "", ""),
    ],
    ids=["llama 3", "gpt-oss", "mistral", "smollm3", "minutes", "hours", "seconds", "random"],
)
def test_what_changes_is_found(
    template: str, period: str, before: str, variable: str, tmp_path: Path
) -> None:
    found = find_insertion(save(tmp_path, template))
    assert isinstance(found, Insertion)
    assert (found.period, found.variable) == (period, variable)
    assert before or found.position < 2
    if variable:
        expected = 'vllm serve … --default-chat-template-kwargs \'{"date_string": "26 Jul 2024"}\''
        assert found.remedy == expected
    else:
        assert "--chat-template FILE" in found.remedy


@pytest.mark.parametrize(
    "template",
    [
        CHAT,
        CHAT + '{{ "It is " + strftime_now("%H:%M:%S") }}',
        "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT,
        '{% if false %}{{ strftime_now("%H:%M:%S") }}{% endif %}' + CHAT,
        "{{ ['Hi', 'Hello'] | first }}" + CHAT,
    ],
    ids=["none", "after the messages", "tools", "never used", "first of a list"],
)
def test_what_does_not_change_before_the_messages_end_is_no_insertion(template: str, tmp_path: Path) -> None:
    assert find_insertion(save(tmp_path, template)) is None


def test_variable_is_one_that_vllm_passes_on() -> None:
    hf = pytest.importorskip("vllm.renderers.hf")
    tokenizer = SimpleNamespace(apply_chat_template=lambda conversation: conversation)
    given = {"date_string": "26 Jul 2024", "another": 1}
    assert hf.resolve_chat_template_kwargs(tokenizer, LLAMA, given) == {"date_string": "26 Jul 2024"}


def test_position_is_where_prompts_part(tmp_path: Path) -> None:
    found = find_insertion(save(tmp_path, LLAMA))
    assert isinstance(found, Insertion)
    before = (
        "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: "
    )
    assert found.position == len(before) + 1  # 14 and 15 January: the first digit is the same.


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_template_is_read_from_where_transformers_reads_it(name: str, tmp_path: Path) -> None:
    save(tmp_path, LLAMA, name)
    if name == "chat_template.jinja":  # It goes before the others.
        save(tmp_path, CHAT)
    assert isinstance(find_insertion(tmp_path), Insertion)


def test_of_several_templates_the_worst_counts(tmp_path: Path) -> None:
    seconds = '{{ strftime_now("%S") }}' + CHAT
    named = [
        {"name": name, "template": source} for name, source in (("default", LLAMA), ("tool_use", seconds))
    ]
    found = find_insertion(save(tmp_path, named))
    assert isinstance(found, Insertion)
    assert found.period == "every second"


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{% for", {}, 7, "{{ messages.__class__.__mro__ }}"],
    ids=["refuses everything", "broken", "empty", "no text", "hostile"],
)
def test_what_cannot_be_rendered_is_not_judged(template: object, tmp_path: Path) -> None:
    assert find_insertion(save(tmp_path, template)) is None


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"])
def test_broken_files_are_not_judged(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert find_insertion(tmp_path) is None


def test_folder_without_a_template(tmp_path: Path) -> None:
    assert find_insertion(tmp_path) is None
    assert find_insertion(tmp_path / "missing") is None
