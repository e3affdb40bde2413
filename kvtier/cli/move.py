"""``kvtier move``: move a prompt's chunks to another tier, of the same or another instance."""

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
    required_prompt,
)
from kvtier.cli.terminal import AsJson

EXAMPLES = """
Examples:

  kvtier move prefill-1/ram decode-1/ram --prompt-file prompt.txt

  kvtier move prefill-1/ssd decode-1/ram --tokens-file tokens.json --copy

  kvtier move decode-1/ram decode-1/ssd --tokens '[128000, 849, 21435]' --no-wait
"""


def move(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Source, as INSTANCE/TIER.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Target, as INSTANCE/TIER.")],
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    model: ModelName = None,
    salt: Salt = None,
    copy: Annotated[bool, typer.Option("--copy", help="Keep the chunks at FROM.")] = False,
    no_wait: NoWait = False,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Move a prompt's chunks to another tier, of the same or another instance.

    Chunks are removed from FROM only after TO has confirmed them. Ctrl-C stops waiting, but not the move.
    Exit status 1 if it fails.
    """
    query = required_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    positions = parse_place(source, "FROM"), parse_place(target, "TO")
    with controller(url, token_file, config) as client:
        print_outcome(client, client.move(*positions, query, copy=copy), wait=not no_wait, as_json=as_json)
