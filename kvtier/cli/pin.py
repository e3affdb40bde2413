"""``kvtier pin`` and ``kvtier unpin``: protect a prompt's chunks from eviction."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtier.cli.controller_follow import print_outcome
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
    parse_place,
    parse_seconds,
    required_prompt,
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

Where = Annotated[str, typer.Argument(metavar="WHERE", help="The tier that holds them, as INSTANCE/TIER.")]


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
        typer.Option(
            metavar="DURATION", help="Duration of the pin, such as `1h`. Default: until `kvtier unpin`."
        ),
    ] = None,
    no_wait: NoWait = False,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Protect a prompt's chunks from eviction, also across restarts of the instance."""
    query = required_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    position = parse_place(where, "WHERE")
    ttl_seconds = parse_seconds(ttl, "--ttl")
    with controller(url, token_file, config) as client:
        print_outcome(client, client.pin(position, query, ttl=ttl_seconds), wait=not no_wait, as_json=as_json)


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
    """Allow a prompt's chunks to be evicted again."""
    query = required_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    position = parse_place(where, "WHERE")
    with controller(url, token_file, config) as client:
        print_outcome(client, client.unpin(position, query), wait=not no_wait, as_json=as_json)
