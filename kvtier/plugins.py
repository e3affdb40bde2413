"""What plugins provide, found by name; built-ins come by the same hooks as third parties.

Third parties are found by the entry-point group ``kvtier``. All of this runs once, at start-up.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pluggy
from pydantic import ValidationError

from kvtier import hookspecs
from kvtier.errors import PluginError, SettingsError
from kvtier.settings import LocalTierSettings, Settings, TierSettings, describe
from kvtier.settings_errors import explain
from kvtier.settings_sources import nearest

if TYPE_CHECKING:
    import typer

    from kvtier.backends.base import Backend
    from kvtier.events import Observer
    from kvtier.eviction.base import EvictionPolicy
    from kvtier.transports.base import Transport, TransportSettings

GROUP = "kvtier"
BUILT_IN = "built in"
BUILT_IN_MODULES = ("kvtier.backends", "kvtier.eviction", "kvtier.transports")

_PROVIDING_HOOKS = ("kvtier_backends", "kvtier_transports", "kvtier_eviction_policies")
_MEMORY_POWERS = ("arena", "adopt", "lease", "idle", "discard")

Found = TypeVar("Found")


class LoadedPlugin(NamedTuple):
    """One plugin, for people."""

    name: str
    source: str
    """``"built in"``, or the distribution and its version."""
    hooks: tuple[str, ...]
    provides: tuple[str, ...]
    """The names that tiers may use, such as ``"disk"``."""


class Plugins:
    """The plugins of one process. Made with :meth:`load`; synchronous, never used per batch."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._sources: dict[str, str] = {}
        self._provided: dict[str, dict[str, tuple[type, str]]] = {hook: {} for hook in _PROVIDING_HOOKS}

    @classmethod
    def load(cls, only: Sequence[str] | None = None) -> Plugins:
        """Load what is built in, and the installed plugins: all, or those that ``only`` names.

        A name is a distribution's or an entry point's. Imports them; blocks as long as that takes. Raises
        :class:`PluginError` for a plugin that cannot be loaded and for two that claim one name, and
        :class:`SettingsError` for a name that is not installed.
        """
        plugins = cls()
        for module in BUILT_IN_MODULES:
            plugins.register(importlib.import_module(module), module, BUILT_IN)
        for entry in _chosen(installed(), only):
            plugins.register(_import(entry), entry.name, source_of(entry))
        return plugins

    def register(self, plugin: object, name: str, source: str) -> None:
        """Add one plugin. Raises :class:`PluginError` where it does not keep to the hooks."""
        if name in self._sources:
            raise PluginError(
                f"two plugins are called {name!r}: {self._sources[name]} and {source}; uninstall one, "
                "or name the distributions to load in the setting plugins"
            )
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"plugin {_label(name, source)} does not fit kvtier's hooks: {error}"
            ) from error
        self._sources[name] = source
        for hook in _PROVIDING_HOOKS:
            for answer in self._answers(hook, name):
                self._take(hook, answer, name)

    def _answers(self, hook: str, name: str, **arguments: object) -> list[Any]:
        """What one plugin answers to one hook."""
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        label = _label(name, self._sources[name])
        try:
            answers: list[Any] = self._manager.subset_hook_caller(hook, others)(**arguments)
        except Exception as error:
            raise PluginError(f"plugin {label} failed in {hook}: {type(error).__name__}: {error}") from error
        return answers

    def _take(self, hook: str, answer: object, name: str) -> None:
        label = _label(name, self._sources[name])
        if not isinstance(answer, Mapping) or not all(isinstance(value, type) for value in answer.values()):
            raise PluginError(f"plugin {label}: {hook} must return a dict from names to classes")
        provided = self._provided[hook]
        for key, value in answer.items():
            if key in provided:
                first = _label(provided[key][1], self._sources[provided[key][1]])
                raise PluginError(
                    f"{first} and {label} both provide {key!r} in {hook}: uninstall one, or leave it out of "
                    "the setting plugins"
                )
            provided[key] = (value, name)

    def names(self, hook: str) -> list[str]:
        """The names that a hook's implementations provide, in the order in which they were loaded."""
        return list(self._provided[hook])

    def backend(self, type_name: str) -> type[Backend]:
        """The backend that a tier's ``type`` names. Raises :class:`SettingsError` listing those there are."""
        return self._find("kvtier_backends", type_name, "tier type")

    def transport(self, name: str) -> type[Transport]:
        """A transport by name. Raises :class:`SettingsError` listing those that exist."""
        return self._find("kvtier_transports", name, "transport")

    def eviction(self, name: str) -> type[EvictionPolicy]:
        """An eviction policy by name. Raises :class:`SettingsError` listing those that exist."""
        return self._find("kvtier_eviction_policies", name, "eviction policy")

    def _find(self, hook: str, name: str, what: str) -> type:
        provided = self._provided[hook]
        if name not in provided:
            known = ", ".join(provided) or "none"
            raise SettingsError(
                f"there is no {what} {name!r}: write one of those there are ({known}), or install and load "
                "the plugin that provides it (`kvtier plugins` lists those loaded)"
            )
        return provided[name][0]

    def observers(self, settings: Settings) -> list[Observer]:
        """The observers of all plugins, made for one cache. Raises :class:`PluginError`."""
        observers: list[Observer] = []
        for name, source in self._sources.items():
            for answer in self._answers("kvtier_observers", name, settings=settings):
                if not isinstance(answer, Iterable):
                    raise PluginError(
                        f"plugin {_label(name, source)}: kvtier_observers must return observers in a list"
                    )
                observers.extend(answer)
        return observers

    def add_commands(self, app: typer.Typer) -> None:
        """Let all plugins add their commands to the command line. Raises :class:`PluginError`."""
        for name in self._sources:
            self._answers("kvtier_commands", name, app=app)

    def loaded(self) -> list[LoadedPlugin]:
        """What is loaded, built-ins first."""
        return [
            LoadedPlugin(
                name,
                source,
                tuple(sorted(hook.name for hook in self._manager.get_hookcallers(self._plugin(name)) or ())),
                tuple(
                    key
                    for provided in self._provided.values()
                    for key, (_, owner) in provided.items()
                    if owner == name
                ),
            )
            for name, source in self._sources.items()
        ]

    def _plugin(self, name: str) -> object:
        return self._manager.get_plugin(name)

    def tier_settings(self, settings: Settings) -> list[TierSettings]:
        """The tiers, each validated by its own backend's ``settings_type``, with ``queue`` filled in.

        Raises :class:`SettingsError` naming the tier's key, for a contradiction between tiers too.
        """
        place = describe(settings.origin("tiers"))
        tiers = [self._tier(index, raw, place) for index, raw in enumerate(settings.tiers)]
        if not is_memory(self.backend(tiers[0].type)) or not isinstance(tiers[0], LocalTierSettings):
            memory = ", ".join(
                name for name in self.names("kvtier_backends") if is_memory(self.backend(name))
            )
            raise SettingsError(
                f"tiers[0].type{place} is {tiers[0].type}, which engines cannot copy to: the first tier must "
                f"be memory, write one of {memory} and the {tiers[0].type} tier after it"
            )
        seen: dict[str, int] = {}
        for index, tier in enumerate(tiers):
            if tier.name in seen:
                raise SettingsError(
                    f"tiers[{index}].name{place} is {tier.name!r}, which tiers[{seen[tier.name]}] has "
                    "already: write another name"
                )
            seen[tier.name] = index
        first = tiers[0]
        assert isinstance(first, LocalTierSettings)
        quarter = first.capacity // 4
        return [tier if tier.queue else tier.model_copy(update={"queue": quarter}) for tier in tiers]

    def transport_settings(self, settings: Settings) -> TransportSettings:
        """The settings of the transport between peers, validated by its own ``settings_type``.

        Raises :class:`SettingsError` naming the key.
        """
        place = describe(settings.origin("peer.transport"))
        raw = settings.peer.transport
        transport = _named(f"peer.transport{place}", self.transport, raw["type"])
        try:
            return transport.settings_type.model_validate(dict(raw))
        except ValidationError as error:
            problem = explain(error, transport.settings_type, lambda _: place, "peer.transport.")
            raise SettingsError(problem) from error

    def _tier(self, index: int, raw: Mapping[str, Any], place: str) -> TierSettings:
        key = f"tiers[{index}]"
        type_name = raw.get("type")
        if not isinstance(type_name, str):
            known = ", ".join(self.names("kvtier_backends"))
            problem = "is missing" if type_name is None else f"is {type_name!r}"
            raise SettingsError(f"{key}.type{place} {problem}: write one of {known}")
        backend = _named(f"{key}.type{place}", self.backend, type_name)
        settings_type = backend.settings_type
        try:
            tier = settings_type.model_validate(dict(raw))
        except ValidationError as error:
            raise SettingsError(explain(error, settings_type, lambda _: place, f"{key}.")) from error
        if isinstance(tier, LocalTierSettings):
            _named(f"{key}.eviction{place}", self.eviction, tier.eviction)
        return tier


def installed() -> list[EntryPoint]:
    """Entry points of the group ``kvtier``, by distribution. Reads the metadata of what is installed."""
    return sorted(entry_points(group=GROUP), key=lambda entry: (source_of(entry), entry.name))


def source_of(entry: EntryPoint) -> str:
    """The distribution that an entry point belongs to, and its version."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def is_memory(backend: type[Backend]) -> bool:
    """Whether it has the powers of ``SupportsArena``, for which ``issubclass`` cannot be used."""
    return all(hasattr(backend, power) for power in _MEMORY_POWERS)


def _chosen(entries: Sequence[EntryPoint], only: Sequence[str] | None) -> list[EntryPoint]:
    if only is None:
        return list(entries)
    names = [_plain(name) for name in only]
    known = [{_plain(entry.name), _plain(entry.dist.name if entry.dist else "")} for entry in entries]
    for given, name in zip(only, names, strict=True):
        if not any(name in both for both in known):
            there = sorted({entry.dist.name if entry.dist else entry.name for entry in entries})
            remedy = nearest(given, there) if there else "no plugin is installed, write [] or leave it out"
            raise SettingsError(f"plugins names {given!r}, which is not installed: {remedy}")
    return [entry for entry, both in zip(entries, known, strict=True) if both.intersection(names)]


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _import(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except Exception as error:
        raise PluginError(
            f"plugin {_label(entry.name, source_of(entry))} cannot be imported "
            f"({type(error).__name__}: {error}): mend or uninstall it, or leave it out of the setting plugins"
        ) from error


def _label(name: str, source: str) -> str:
    return f"{name} ({source})"


def _named(key: str, find: Callable[[str], Found], name: str) -> Found:
    try:
        return find(name)
    except SettingsError as error:
        raise SettingsError(f"{key}: {error}") from error
