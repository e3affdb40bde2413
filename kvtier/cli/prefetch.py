"""``kvtier prefetch``: bring a prompt's chunks into a tier before they are requested."""

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

EXAMPLES = """
Examples:

  kvtier prefetch decode-1/ram --prompt-file prompt.txt

  kvtier prefetch decode-1/ram --tokens-file tokens.json --deadline 2s
"""


def prefetch(
    where: Annotated[str, typer.Argument(metavar="WHERE", help="Target, as INSTANCE/TIER.")],
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    model: ModelName = None,
    salt: Salt = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Stop after this time, such as `2s`. Chunks that have arrived by then stay.",
        ),
    ] = None,
    no_wait: NoWait = False,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Bring a prompt's chunks into a tier before an engine requests them.

    They are copied from the instance's other tiers, or from other instances.
    """
    query = required_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    position = parse_place(where, "WHERE")
    deadline_seconds = parse_seconds(deadline, "--deadline")
    with controller(url, token_file, config) as client:
        print_outcome(
            client,
            client.prefetch(position, query, deadline=deadline_seconds),
            wait=not no_wait,
            as_json=as_json,
        )
