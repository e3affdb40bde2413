"""``kvtier plugins``: list the loaded plugins."""

from __future__ import annotations

from rich.markup import escape

from kvtier.cli.terminal import AsJson, ConfigFile, output, print_json, table


def plugins(config: ConfigFile = None, as_json: AsJson = False) -> None:
    """List the loaded plugins, their sources and what they provide.

    The setting `plugins` limits which installed plugins are loaded.
    """
    from kvtier.plugins import Plugins
    from kvtier.settings import load_settings

    loaded = Plugins.load(load_settings(file=config).plugins).loaded()
    if as_json:
        print_json([plugin._asdict() for plugin in loaded])
        return
    rows = table("name", "from", "hooks", "provides")
    for plugin in loaded:
        rows.add_row(
            escape(plugin.name),
            escape(plugin.source),
            ", ".join(plugin.hooks),
            escape(", ".join(plugin.provides)),
        )
    output().print(rows)
