"""Read the settings with the plugins, and find all problems at once."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from kvtier.plugins import Plugins, collected
from kvtier.settings import Settings, TierSettings
from kvtier.settings.model import load_valid


class Loaded(NamedTuple):
    """Settings and plugins. Where they have problems, defaults and the built-in plugins take their place."""

    settings: Settings
    plugins: Plugins
    tiers: list[TierSettings]
    """Empty if one of them has a problem."""
    problems: list[str]


def load_all(file: Path | None) -> Loaded:
    """Read the settings, load the plugins, and check the tiers and the transport. Blocks. Never raises."""
    settings, problems = load_valid(file=file)
    plugins, tiers = Plugins.load([]), list[TierSettings]()
    with collected(problems):
        plugins = Plugins.load(settings.plugins)
    with collected(problems):
        plugins.transport_settings(settings)
    with collected(problems):
        tiers = plugins.tier_settings(settings)
    return Loaded(settings, plugins, tiers, problems)
