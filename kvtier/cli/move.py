"""``kvtier move``: take a prompt's chunks from one tier to another, of one instance or of two."""

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
)
from kvtier.cli.terminal import AsJson

EXAMPLES = """
Examples:

  kvtier move prefill-1/ram decode-1/ram --prompt-file prompt.txt

  kvtier move prefill-1/ssd decode-1/ram --tokens-file tokens.json --copy

  kvtier move decode-1/ram decode-1/ssd --tokens '[128000, 849, 21435]' --no-wait
"""


def move(
    source: Annotated[str, typer.Argument(metavar="FROM", help="Where they are, as INSTANCE/TIER.")],
    target: Annotated[str, typer.Argument(metavar="TO", help="Where they shall be, as INSTANCE/TIER.")],
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    model: ModelName = None,
    salt: Salt = None,
    copy: Annotated[bool, typer.Option("--copy", help="Leave them where they are, too.")] = False,
    no_wait: NoWait = False,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Move a prompt's chunks from one tier to another, of one instance or of two.

    They are removed from FROM only after TO has confirmed that it holds them. Ctrl-C ends the waiting, not
    the move. Exit status 1 where it failed.
    """
    asked = needed_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    places = place(source, "FROM"), place(target, "TO")
    with controller(url, token_file, config) as client:
        carry_out(client, client.move(*places, asked, copy=copy), wait=not no_wait, as_json=as_json)
