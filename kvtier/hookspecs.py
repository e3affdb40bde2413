"""The hooks by which backends, transports, eviction policies, observers and commands are added.

A plugin is a module, or an object, whose functions of these names are marked with :data:`hookimpl`, named
by an entry point of the group ``kvtier``. Hooks are called when a cache process or a command starts, from
its main thread and outside any event loop; they may import, and should open nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import typer

    from kvtier.backends.base import Backend
    from kvtier.events import Observer
    from kvtier.eviction.base import EvictionPolicy
    from kvtier.settings import Settings
    from kvtier.transports.base import Transport

PROJECT = "kvtier"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a function as an implementation of the hook whose name it has."""


@hookspec
def kvtier_backends() -> dict[str, type[Backend]]:
    """Backends by the name that a tier's ``type`` calls them by.

    A class is constructed with one argument, the tier's settings, already validated by its
    ``settings_type``. Names that another plugin has taken stop start-up.
    """
    raise NotImplementedError


@hookspec
def kvtier_transports() -> dict[str, type[Transport]]:
    """Transports between hosts by the name that ``peer.transport`` calls them by.

    A class is constructed with one argument, its settings, already validated by its ``settings_type``.
    """
    raise NotImplementedError


@hookspec
def kvtier_eviction_policies() -> dict[str, type[EvictionPolicy]]:
    """Eviction policies by the name that a tier's ``eviction`` calls them by.

    A class is constructed without arguments, once for each tier that names it.
    """
    raise NotImplementedError


@hookspec
def kvtier_observers(settings: Settings) -> Iterable[Observer]:
    """Observers that are told of every batch and phase. Called once for each cache that is opened."""
    raise NotImplementedError


@hookspec
def kvtier_commands(app: typer.Typer) -> None:
    """Add commands to ``kvtier``'s command line. Called before the command line is parsed."""
    raise NotImplementedError
