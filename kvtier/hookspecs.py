"""Plugin hooks for backends, transports, eviction policies, codecs, observers and commands.

A plugin is a module or object that implements these functions, marks them with :data:`kvtier.hookimpl`, and
is named by an entry point of the group ``kvtier``. Hooks run when a cache process or a command starts, in its
main thread and outside any event loop. They may import modules, and should not open files or connections.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtier.hookmarkers import hookspec

if TYPE_CHECKING:
    import typer

    from kvtier.backends.base import Backend
    from kvtier.catalog.eviction import EvictionPolicy
    from kvtier.events import Observer
    from kvtier.settings import Settings
    from kvtier.tiers.codec import Codec
    from kvtier.transports.base import Transport


@hookspec
def kvtier_backends() -> dict[str, type[Backend]]:
    """Return backends, keyed by the ``type`` of a tier.

    A class is constructed with one argument, the tier's settings, already validated by its
    ``settings_type``. A name that another plugin provides as well is an error at startup.
    """
    raise NotImplementedError


@hookspec
def kvtier_transports() -> dict[str, type[Transport]]:
    """Return transports between hosts, keyed by their name in ``peer.transport``.

    A class is constructed with one argument, its settings, already validated by its ``settings_type``.
    """
    raise NotImplementedError


@hookspec
def kvtier_eviction_policies() -> dict[str, type[EvictionPolicy]]:
    """Return eviction policies, keyed by their name in a tier's ``eviction``.

    A class is constructed once for each tier that uses it, with its settings, already validated by its
    ``settings_type``, the tier's capacity in bytes and the columns of the catalog.
    """
    raise NotImplementedError


@hookspec
def kvtier_codecs() -> dict[str, type[Codec]]:
    """Return codecs, keyed by their name in a tier's ``codec``.

    A class is constructed with one argument, its settings, already validated by its ``settings_type``. Two
    codecs with the same ``code`` are an error at startup.
    """
    raise NotImplementedError


@hookspec
def kvtier_observers(settings: Settings) -> Iterable[Observer]:
    """Return observers, which receive every transfer and change. Called once for each opened cache."""
    raise NotImplementedError


@hookspec
def kvtier_commands(app: typer.Typer) -> None:
    """Add commands to the ``kvtier`` command line. Called before the command line is parsed."""
    raise NotImplementedError
