"""Whether a model's chat template inserts something that changes: prompts part there, and miss the rest.

It is rendered at different times, as transformers does. So what it inserts is seen, not guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple

FIRST = datetime(2026, 1, 14, 10, 20, 30)  # noqa: DTZ001 - transformers passes a local time as well
EVERY_REQUEST = "with each request"
PERIODS = {
    EVERY_REQUEST: timedelta(0),
    "every second": timedelta(seconds=1),
    "every minute": timedelta(minutes=1),
    "every hour": timedelta(hours=1),
    "every day": timedelta(days=1),
}
TRIES = 8
"""A random choice is noticed in one of so many renderings."""
QUESTION = "kvtier-question"
_USER = {"role": "user", "content": QUESTION}
CONVERSATIONS = [[{"role": "system", "content": "kvtier-system"}, _USER], [_USER]]
PINNED = "26 Jul 2024"
_VARIABLE = re.compile(r"\w*(?:date|time|today|now)\w*")
Render = Callable[..., str]
"""Renders a template for a conversation, at a time, given variables."""


class Insertion(NamedTuple):
    """Something that a chat template inserts before the messages end, and that changes."""

    period: str
    """How often it changes: one of :data:`PERIODS`."""
    position: int
    """How many characters are before it."""
    variable: str
    """A variable of the template that is inserted instead if it is given; empty if there is none."""

    def __str__(self) -> str:
        """Say what happens."""
        return f"inserts what changes {self.period} after {self.position} characters: prompts miss the rest"

    @property
    def remedy(self) -> str:
        """Return what to type."""
        if self.variable:
            value = json.dumps({self.variable: PINNED})
            return f"vllm serve … --default-chat-template-kwargs '{value}'"
        return "copy the template, write a fixed text instead, and vllm serve … --chat-template FILE"


def find_insertion(folder: Path) -> Insertion | None:
    """Return what the chat templates in a model's folder insert, as far as they can be rendered here.

    If there is more than one, that which changes most often. Blocks for some 50 ms.
    """
    found: list[Insertion] = []
    with suppress(Exception):  # A file may contain anything, and transformers may not be installed.
        for source, conversation in product(_sources(folder), CONVERSATIONS):
            with suppress(Exception):  # Many templates refuse a system message.
                found += _insertions(partial(_render, source, conversation), source)
    return min(found, key=lambda each: PERIODS[each.period], default=None)


def _sources(folder: Path) -> list[str]:
    """Return the model's own templates, from where transformers reads them."""
    if (file := folder / "chat_template.jinja").is_file():
        return [file.read_text()]
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (file := folder / name).is_file():
            template = json.loads(file.read_text()).get("chat_template")
            if template:
                return [template] if isinstance(template, str) else [each["template"] for each in template]
    return []


def _insertions(render: Render, source: str) -> list[Insertion]:
    first = render(FIRST)
    end = first.find(QUESTION)
    for period, step in PERIODS.items():
        others = [render(FIRST + step) for _ in range(1 if step else TRIES)]
        position = len(commonprefix([first, *others]))  # noqa: RUF071 - of texts
        if position < (len(first) if end < 0 else end):
            pinned = (name for name in sorted(set(_VARIABLE.findall(source))) if _pins(render, name, step))
            return [Insertion(period, position, next(pinned, ""))]
    return []


def _pins(render: Render, name: str, step: timedelta) -> bool:
    """Return whether the template inserts a variable instead, if it is given."""
    with suppress(Exception):
        first, other = (render(FIRST + each, **{name: PINNED}) for each in (timedelta(0), step))
        return first == other and PINNED in first
    return False


def _render(source: str, conversation: list[dict[str, str]], at: datetime, **given: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    values = {"bos_token": "", "eos_token": "", "strftime_now": at.strftime, **given}
    [rendered], _ = render_jinja_template(
        [conversation], chat_template=source, add_generation_prompt=True, **values
    )
    return str(rendered)
