"""``kvtier prefetch``: bring a prompt's chunks up before they are asked for."""

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

EXAMPLES = """
Examples:

  kvtier prefetch decode-1/ram --prompt-file prompt.txt

  kvtier prefetch decode-1/ram --tokens-file tokens.json --deadline 2s
"""


def prefetch(
    where: Annotated[str, typer.Argument(metavar="WHERE", help="Where they shall be, as INSTANCE/TIER.")],
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    model: ModelName = None,
    salt: Salt = None,
    deadline: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Be content with what has come by then, such as `2s`."),
    ] = None,
    no_wait: NoWait = False,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Bring a prompt's chunks into a tier before an engine asks for them.

    They come from the instance's other tiers, or from other instances that hold them, where they stay.
    """
    asked = needed_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    at = place(where, "WHERE")
    until = seconds(deadline, "--deadline")
    with controller(url, token_file, config) as client:
        carry_out(client, client.prefetch(at, asked, deadline=until), wait=not no_wait, as_json=as_json)
