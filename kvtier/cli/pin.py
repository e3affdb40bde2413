"""``kvtier pin`` and ``kvtier unpin``: keep a prompt's chunks from being evicted."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.controller_follow import carry_out
from kvtier.cli.controller_options import (
    ControllerURL,
    ModelName,
    NoWait,
    PromptFile,
    PromptText,
    Salt,
    SettingsFile,
    TokenFile,
    Tokens,
    TokensFile,
    controller,
    needed_prompt,
    place,
    seconds,
)
from kvtier.cli.terminal import AsJson

PIN_EXAMPLES = """
Examples:

  kvtier pin decode-1/ram --prompt-file system-prompt.txt

  kvtier pin decode-1/ram --tokens-file tokens.json --ttl 1h
"""
UNPIN_EXAMPLES = """
Examples:

  kvtier unpin decode-1/ram --prompt-file system-prompt.txt
"""

Where = Annotated[str, typer.Argument(metavar="WHERE", help="Where they are, as INSTANCE/TIER.")]


def pin(
    where: Where,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    model: ModelName = None,
    salt: Salt = None,
    ttl: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="For how long, such as `1h`. Left out: until `kvtier unpin`."),
    ] = None,
    no_wait: NoWait = False,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Keep a prompt's chunks from being evicted, also after the instance was restarted."""
    asked = needed_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    at = place(where, "WHERE")
    lasting = seconds(ttl, "--ttl")
    with controller(url, token_file, config) as client:
        carry_out(client, client.pin(at, asked, ttl=lasting), wait=not no_wait, as_json=as_json)


def unpin(
    where: Where,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    model: ModelName = None,
    salt: Salt = None,
    no_wait: NoWait = False,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Let a prompt's chunks be evicted again."""
    asked = needed_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    at = place(where, "WHERE")
    with controller(url, token_file, config) as client:
        carry_out(client, client.unpin(at, asked), wait=not no_wait, as_json=as_json)
