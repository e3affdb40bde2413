"""``kvtier clear``: remove a prompt's chunks, or all chunks, from an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

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
    optional_prompt,
    parse_place,
)
from kvtier.cli.terminal import AsJson
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.cli.controller_answers import Prompt
    from kvtier.cli.controller_client import Controller

EXAMPLES = """
Examples:

  kvtier clear decode-1/ram --prompt-file prompt.txt

  kvtier clear decode-1/ssd

  kvtier clear decode-1 --yes
"""


def clear(
    where: Annotated[
        str, typer.Argument(metavar="WHERE", help="INSTANCE/TIER, or INSTANCE alone for all its tiers.")
    ],
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    model: ModelName = None,
    salt: Salt = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    no_wait: NoWait = False,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Remove a prompt's chunks, or without a prompt all chunks, from a tier or an instance.

    Shows the amount first, and asks for confirmation.
    """
    query = optional_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    instance, tier = parse_place(where, "WHERE") if "/" in where else (where, None)
    with controller(url, token_file, config) as client:
        if not yes:
            typer.confirm(_question(client, instance, tier, query), abort=True, err=True)
        print_outcome(client, client.clear(instance, tier, query), wait=not no_wait, as_json=as_json)


def _question(client: Controller, instance: str, tier: str | None, prompt: Prompt | None) -> str:
    """Return the confirmation question with the amount. Raises: ControllerError: unknown instance."""
    tiers = [each for each in client.instance(instance).tiers if tier in (None, each.name, each.type)]
    if prompt is None:
        amounts = [f"{each.chunks} chunks, {format_size(each.used)}, from {each.name}" for each in tiers]
        return f"Remove {'; '.join(amounts) or 'everything'} of {instance}?"
    found = client.lookup(prompt)
    held = found.instances.get(instance, {})
    amounts = [f"{held.get(each.name, 0)} from {each.name}" for each in tiers]
    return f"Remove, of {found.num_tokens} tokens, {'; '.join(amounts) or 'all'} of {instance}?"
