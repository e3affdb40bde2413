"""``kvtier lookup``: find the tiers that hold a prefix of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.markup import escape

from kvtier.cli.controller_options import (
    ControllerURL,
    ModelName,
    PromptFile,
    PromptText,
    Salt,
    SettingsFile,
    TokenFile,
    Tokens,
    TokensFile,
    controller,
    required_prompt,
)
from kvtier.cli.terminal import AsJson, output, print_json, table

if TYPE_CHECKING:
    from kvtier.cli.controller_answers import Found

EXAMPLES = """
Examples:

  kvtier lookup --prompt 'Explain the significance of KV cache in language models.'

  kvtier lookup --tokens '[128000, 849, 21435]' --model meta-llama/Llama-3.1-8B-Instruct

  curl -s localhost:8000/tokenize --json @prompt.json | kvtier lookup --tokens-file -
"""


def lookup(
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    tokens: Tokens = None,
    tokens_file: TokensFile = None,
    model: ModelName = None,
    salt: Salt = None,
    url: ControllerURL = None,
    token_file: TokenFile = None,
    config: SettingsFile = None,
    as_json: AsJson = False,
) -> None:
    """Show which instances and tiers hold a prefix of a prompt, and how many of its tokens.

    Tiers that hold none are omitted.
    """
    query = required_prompt(prompt, prompt_file, tokens, tokens_file, model, salt)
    with controller(url, token_file, config) as client:
        found = client.lookup(query)
    if as_json:
        import msgspec

        print_json(msgspec.to_builtins(found))
    else:
        _print(found)


def _print(found: Found) -> None:
    rows = table("instance", "tier", "tokens", "of the prompt")
    held = [
        (count, instance, tier)
        for instance, tiers in found.instances.items()
        for tier, count in tiers.items()
        if count
    ]
    for count, instance, tier in sorted(held, key=lambda row: (-row[0], row[1], row[2])):
        share = f"{count / found.num_tokens:.0%}" if found.num_tokens else "-"
        rows.add_row(escape(instance), escape(tier), str(count), share)
    if held:
        output().print(rows)
    else:
        output().print(
            f"No instance holds a prefix of this prompt ({found.num_tokens} tokens, model "
            f"{escape(found.model)})."
        )
