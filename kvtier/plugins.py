"""Plugin registry: backends, transports, eviction policies and observers by name.

Built-in components use the same hooks as third-party plugins, which are discovered through the entry point
group ``kvtier``. All of this runs once, at startup.
"""

from __future__ import annotations

import importlib
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pluggy
from pydantic import BaseModel, ValidationError

from kvtier import hookspecs, native
from kvtier.errors import KVTierError, PluginError, SettingsError
from kvtier.events import Observer
from kvtier.hookmarkers import PROJECT
from kvtier.settings import LocalTierSettings, Settings, TierSettings
from kvtier.settings.errors import explain
from kvtier.settings.model import load_valid
from kvtier.settings.sources import suggestion
from kvtier.settings.tenants import tenants_of_tier
from kvtier.settings.values import valid_choice

if TYPE_CHECKING:
    import typer

    from kvtier.backends.base import Backend
    from kvtier.catalog.eviction import EvictionPolicy, MakePolicy, PolicySettings
    from kvtier.tiers.codec import Codec
    from kvtier.tiers.encoded_seal import Codecs
    from kvtier.transports.base import Transport, TransportSettings

GROUP = "kvtier"
BUILT_IN = "built in"
MAX_CODE = 65_535
"""Maximum code of a codec: it has two bytes in a header."""
IDENTITY = "identity"
"""The codec that stores chunks as they are."""
AUTO, LOSSLESS = "auto", "lossless"
"""The choice by measurement, between that and this codec: see :mod:`kvtier.tiers.codec_choice`."""
BUILT_IN_MODULES = ("kvtier.backends", "kvtier.catalog", "kvtier.tiers", "kvtier.transports")

_PROVIDING_HOOKS = ("kvtier_backends", "kvtier_transports", "kvtier_eviction_policies", "kvtier_codecs")

Found = TypeVar("Found")
ModelT = TypeVar("ModelT", bound=BaseModel)


class LoadedPlugin(NamedTuple):
    """Description of one loaded plugin, for display."""

    name: str
    source: str
    """``"built in"``, or distribution and version."""
    hooks: tuple[str, ...]
    provides: tuple[str, ...]
    """Names that settings may use, such as ``"disk"``."""


class Plugins:
    """The plugins of one process. Created with :meth:`load`. Synchronous; not used on the data path."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._sources: dict[str, str] = {}
        self._provided: dict[str, dict[str, tuple[type, str]]] = {hook: {} for hook in _PROVIDING_HOOKS}

    @classmethod
    def load(cls, only: Sequence[str] | None = None, found: Iterable[EntryPoint] | None = None) -> Plugins:
        """Load the built-in components and the installed plugins: all, or those named in ``only``.

        A name is that of a distribution or an entry point. ``found``: the entry points of the group, if they
        have been looked up already, which takes 20 ms. Blocks while it imports the plugins. Raises
        :class:`PluginError` if a plugin cannot be loaded or two plugins claim one name, and
        :class:`SettingsError` if a named plugin is not installed.
        """
        plugins = cls()
        for module in BUILT_IN_MODULES:
            plugins.register(importlib.import_module(module), module, BUILT_IN)
        for entry in _select(installed(found), only):
            plugins.register(_import(entry), entry.name, source_of(entry))
        return plugins

    def register(self, plugin: object, name: str, source: str) -> None:
        """Add one plugin. Raises :class:`PluginError` if it does not implement the hooks correctly."""
        if name in self._sources:
            raise PluginError(
                f"two plugins are named {name!r}: {self._sources[name]} and {source}; uninstall one, "
                "or list the distributions to load in the setting plugins"
            )
        try:
            self._manager.register(plugin, name)
            self._manager.check_pending()  # Until then, pluggy accepts hooks that do not exist.
        except pluggy.PluginValidationError as error:
            raise PluginError(
                f"plugin {_label(name, source)} does not match kvtier's hooks: {error}"
            ) from error
        self._sources[name] = source
        for hook in _PROVIDING_HOOKS:
            for result in self._call(hook, name):
                self._add(hook, result, name)

    def _call(self, hook: str, name: str, **arguments: object) -> list[Any]:
        """Call a hook of one plugin. Return its results."""
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        label = self._label(name)
        try:
            results: list[Any] = self._manager.subset_hook_caller(hook, others)(**arguments)
        except Exception as error:
            raise PluginError(f"plugin {label} failed in {hook}: {type(error).__name__}: {error}") from error
        return results

    def _add(self, hook: str, result: object, name: str) -> None:
        label = self._label(name)
        if not isinstance(result, Mapping) or not all(isinstance(value, type) for value in result.values()):
            raise PluginError(f"plugin {label}: {hook} must return a dict from names to classes")
        provided = self._provided[hook]
        for key, value in result.items():
            if key in provided:
                first = self._label(provided[key][1])
                raise PluginError(
                    f"{first} and {label} both provide {key!r} in {hook}: uninstall one, or remove it from "
                    "the setting plugins"
                )
            provided[key] = (value, name)
        self._check_codes()

    def _check_codes(self) -> None:
        """Raise :class:`PluginError` if two codecs have the same code, so that readers would confuse them."""
        names: dict[int, str] = {}
        for name, (codec, owner) in self._provided["kvtier_codecs"].items():
            code = getattr(codec, "code", None)
            if not isinstance(code, int) or not 0 <= code <= MAX_CODE:
                raise PluginError(f"the codec {name!r} of {owner} has no code from 1 to {MAX_CODE}: {code!r}")
            if (other := names.setdefault(code, name)) != name:
                raise PluginError(f"the codecs {other!r} and {name!r} have the same code {code}")

    def _label(self, name: str) -> str:
        return _label(name, self._sources[name])

    def names(self, hook: str) -> list[str]:
        """Return the names that a hook's implementations provide, in load order."""
        return list(self._provided[hook])

    def backend(self, type_name: str) -> type[Backend]:
        """Return the backend of a tier type. Raises :class:`SettingsError`, which lists the known ones."""
        return self._find("kvtier_backends", type_name, "tier type")

    def transport(self, name: str) -> type[Transport]:
        """Return a transport by name. Raises :class:`SettingsError`, which lists the known ones."""
        return self._find("kvtier_transports", name, "transport")

    def eviction(self, name: str) -> type[EvictionPolicy]:
        """Return an eviction policy by name. Raises :class:`SettingsError`, which lists the known ones."""
        return self._find("kvtier_eviction_policies", name, "eviction policy")

    def codec(self, name: str, *, exact: bool = False) -> type[Codec]:
        """Return a codec by name, or the one that `auto` uses while it pays.

        Raises :class:`SettingsError`, which lists the known ones, with ``exact`` those without loss only.
        """

        def can_be_used(codec: type[Codec]) -> bool:
            return not (exact and codec.lossy)

        name = LOSSLESS if name == AUTO else name
        return self._find("kvtier_codecs", name, "codec", AUTO, can_be_used=can_be_used)

    def codecs(self, tier: TierSettings, backend: Backend) -> Codecs | None:
        """Return the codec of a lower tier, and all others to read what it was stored with before.

        ``None`` for memory and shared pools that store chunks as they are.

        Raises a :class:`pydantic.ValidationError` if the codec's settings are invalid.
        """
        if not can_be_encoded(type(backend)):
            return None
        is_plain = tier.codec["type"] == IDENTITY and tier.encrypt is None
        if is_plain and (not isinstance(tier, LocalTierSettings) or is_memory(type(backend))):
            return None
        return self._codecs(tier.codec)

    def peer_codecs(self, settings: Settings) -> Codecs | None:
        """Return the codec of what peers fetch from each other, and all others; ``None`` without one.

        Raises :class:`SettingsError`, which names the key.
        """
        choice = settings.peer.codec
        self._component("peer.codec", choice, partial(self.codec, exact=True), settings)
        if self.codec(choice["type"]).lossy:
            problem = f"is {choice['type']}, which loses precision: use {LOSSLESS} or {AUTO}"
            raise SettingsError(f"{settings.at('peer.codec')} {problem}")
        # Without the native core, a peer would be asked for what cannot be decoded here.
        if choice["type"] == IDENTITY or not native.available():
            return None
        codecs = self._codecs(choice)
        exact = {code: codec for code, codec in codecs.known.items() if not codec.lossy}
        return codecs._replace(known=exact)

    def _codecs(self, choice: Mapping[str, Any]) -> Codecs:
        from kvtier.tiers.encoded_seal import Codecs

        name = choice["type"]
        own = self.codec(name)
        known = {codec.code: codec for codec in self.all_codecs().values()}
        return Codecs(own(own.settings_type.model_validate(choice)), known, measured=name == AUTO)

    def all_codecs(self) -> dict[str, Codec]:
        """Return each codec by name, with its default settings, to read with."""
        classes = {name: self.codec(name) for name in self.names("kvtier_codecs")}
        return {name: codec(codec.settings_type(type=name)) for name, codec in classes.items()}

    def policy(self, tier: TierSettings) -> MakePolicy:
        """Return what creates the eviction policy of a tier. Catalog entries of a shared pool leave by LRU.

        Raises a :class:`pydantic.ValidationError` if the policy's settings are invalid.
        """
        if not isinstance(tier, LocalTierSettings):
            return self.eviction("lru").factory()
        return self.eviction(tier.eviction["type"]).factory(self.policy_settings(tier), tier.capacity)

    def policy_settings(self, tier: LocalTierSettings) -> PolicySettings:
        """Return the settings of a tier's eviction policy. Raises like :meth:`policy`."""
        return self.eviction(tier.eviction["type"]).settings_type.model_validate(tier.eviction)

    def _find(
        self,
        hook: str,
        name: str,
        what: str,
        *others: str,
        can_be_used: Callable[[Any], bool] = lambda _: True,
    ) -> type:
        provided = self._provided[hook]
        if name not in provided:
            usable = [key for key, (component, _) in provided.items() if can_be_used(component)]
            known = ", ".join([*others, *usable]) or "none"
            raise SettingsError(
                f"unknown {what} {reprlib.repr(name)}: use one of {known}, or install and load the plugin "
                "that provides it (`kvtier plugins` lists the loaded ones)"
            )
        return provided[name][0]

    def observers(self, settings: Settings) -> list[Observer]:
        """Create the observers of all plugins for one cache. Raises :class:`PluginError`."""
        observers: list[Observer] = []
        for name, source in self._sources.items():
            for result in self._call("kvtier_observers", name, settings=settings):
                result = list(result) if isinstance(result, Iterable) else [result]
                # Others would lack what observers are told of since they were written.
                if not all(Observer in type(each).__mro__ for each in result):
                    raise PluginError(
                        f"plugin {_label(name, source)}: kvtier_observers must return a list of observers, "
                        "which are subclasses of kvtier.events.Observer"
                    )
                observers.extend(result)
        return observers

    def add_commands(self, app: typer.Typer) -> None:
        """Add the commands of all plugins to the command line. Raises :class:`PluginError`."""
        for name in self._sources:
            self._call("kvtier_commands", name, app=app)

    def loaded(self) -> list[LoadedPlugin]:
        """Return the loaded plugins, built-in ones first."""
        found = []
        for name, source in self._sources.items():
            callers = self._manager.get_hookcallers(self._manager.get_plugin(name)) or ()
            hooks = tuple(sorted(hook.name for hook in callers))
            provided = (pair for by_name in self._provided.values() for pair in by_name.items())
            names = tuple(key for key, (_, owner) in provided if owner == name)
            found.append(LoadedPlugin(name, source, hooks, names))
        return found

    def tier_settings(self, settings: Settings) -> list[TierSettings]:
        """Return the tiers, each validated by its backend's ``settings_type``, with ``queue`` filled in.

        Raises :class:`SettingsError` with one line per invalid key, also for conflicts between tiers.
        """
        problems: list[str] = []
        tiers: dict[int, TierSettings] = {}
        for index, raw in enumerate(settings.tiers):
            with collected(problems):
                tiers[index] = self._tier(index, raw, settings, problems)
        problems += _conflicts(tiers, settings)
        if problems:
            raise SettingsError("\n".join(problems))
        first = tiers[0]
        assert isinstance(first, LocalTierSettings)
        quarter = first.capacity // 4
        return [tier if tier.queue else tier.model_copy(update={"queue": quarter}) for tier in tiers.values()]

    def transport_settings(self, settings: Settings) -> TransportSettings:
        """Return the settings of the transport between peers, validated by its ``settings_type``.

        Raises :class:`SettingsError`, which names the key.
        """
        transport: TransportSettings = self._component(
            "peer.transport", settings.peer.transport, self.transport, settings
        )
        return transport

    def _tier(
        self, index: int, raw: Mapping[str, Any], settings: Settings, problems: list[str]
    ) -> TierSettings:
        """Return a tier. Add to ``problems``, or raise the last one as a :class:`SettingsError`."""
        key = f"tiers[{index}]"
        type_name = raw.get("type")
        if not isinstance(type_name, str):
            known = ", ".join(self.names("kvtier_backends"))
            problem = "is missing" if type_name is None else f"is {reprlib.repr(type_name)}"
            raise SettingsError(f"{settings.at(f'{key}.type')} {problem}: use one of {known}")
        backend = _resolve(f"{key}.type", self.backend, type_name, settings)
        is_local = issubclass(backend.settings_type, LocalTierSettings)
        if index == 0 and not (is_memory(backend) and is_local):
            names = self.names("kvtier_backends")
            memory = ", ".join(name for name in names if is_memory(self.backend(name)))
            problems.append(
                f"{settings.at(f'{key}.type')} is {type_name}, which engines cannot copy to: the first "
                f"tier must be memory; put one of {memory} before the {type_name} tier"
            )
        plain = ""  # Why it stores chunks as they are.
        if index == 0:
            plain = "engines copy to the first tier directly: remove it, or set it for a lower tier"
        elif not can_be_encoded(backend):
            plain = f"{type_name} does not know how long its chunks are: remove it"
        # Before the tier itself, which takes any mapping for them.
        for name, find in (("eviction", self.eviction), ("codec", self.codec)):
            if name not in backend.settings_type.model_fields:
                continue
            choice = valid_choice(raw.get(name, backend.settings_type.model_fields[name].default))
            if choice is None:  # The tier's own validation reports it.
                continue
            with collected(problems):
                self._component(f"{key}.{name}", choice, find, settings)
            if plain and name == "codec" and choice["type"] != IDENTITY:
                problems.append(f"{settings.at(f'{key}.codec')} is {choice['type']}, but {plain}")
        if plain and raw.get("encrypt") is not None:
            problems.append(f"{settings.at(f'{key}.encrypt')} is set, but {plain}")
        return _validate(backend.settings_type, raw, settings, f"{key}.")

    def _component(
        self, key: str, choice: Mapping[str, Any], find: Callable[[str], Any], settings: Settings
    ) -> Any:  # noqa: ANN401 - the settings of any component
        """Return the settings of a component. Raises :class:`SettingsError`, which names the key."""
        component = _resolve(key, find, choice["type"], settings)
        return _validate(component.settings_type, choice, settings, f"{key}.")


def installed(found: Iterable[EntryPoint] | None = None) -> list[EntryPoint]:
    """Return the entry points of the group ``kvtier``, sorted by distribution. Reads package metadata."""
    entries = entry_points(group=GROUP) if found is None else found
    return sorted(entries, key=lambda entry: (source_of(entry), entry.name))


def source_of(entry: EntryPoint) -> str:
    """Return distribution and version of an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value


def is_memory(backend: type[Backend]) -> bool:
    """Whether a tier of this type can be the first one."""
    return hasattr(backend, "create_arena")


def can_be_encoded(backend: type[Backend]) -> bool:
    """Whether a tier of this type can have a codec."""
    return issubclass(backend.settings_type, LocalTierSettings) or hasattr(backend, "lengths")


def _select(entries: Sequence[EntryPoint], only: Sequence[str] | None) -> list[EntryPoint]:
    if only is None:
        return list(entries)
    names = [_normalize(name) for name in only]
    known = [{_normalize(entry.name), _normalize(entry.dist.name if entry.dist else "")} for entry in entries]
    for given, name in zip(only, names, strict=True):
        if not any(name in both for both in known):
            available = sorted({entry.dist.name if entry.dist else entry.name for entry in entries})
            remedy = (
                suggestion(given, available) if available else "no plugin is installed, use [] or omit it"
            )
            raise SettingsError(f"plugins lists {reprlib.repr(given)}, which is not installed: {remedy}")
    return [entry for entry, both in zip(entries, known, strict=True) if both.intersection(names)]


def _conflicts(tiers: Mapping[int, TierSettings], settings: Settings) -> Iterator[str]:
    """Yield what is wrong between the tiers: equal names and folders, and tenants that do not fit."""
    names: dict[str, int] = {}
    paths: dict[str, int] = {}
    for index, tier in tiers.items():
        key = f"tiers[{index}]"
        if (other := names.setdefault(tier.name, index)) != index:
            yield (
                f"{settings.at(f'{key}.name')} is {tier.name!r}, which tiers[{other}] already uses: "
                "choose another name"
            )
        path = getattr(tier, "path", None)
        if isinstance(path, Path):
            other = paths.setdefault(os.path.abspath(path), index)  # noqa: PTH100 - reads no file system
            if other != index:
                yield (
                    f"{settings.at(f'{key}.path')} is {path}, which tiers[{other}] already uses: "
                    "set a folder of its own"
                )
        if isinstance(tier, LocalTierSettings):
            try:
                tenants_of_tier(settings.tenants, tier.tenants)
            except ValueError as error:
                yield f"{settings.at(f'{key}.tenants')} is invalid: {error}"


@contextmanager
def collected(problems: list[str]) -> Iterator[None]:
    """Add an error that ends the block to ``problems``."""
    try:
        yield
    except KVTierError as error:
        problems.append(str(error))


def _normalize(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _import(entry: EntryPoint) -> object:
    try:
        return entry.load()
    except Exception as error:
        raise PluginError(
            f"plugin {_label(entry.name, source_of(entry))} cannot be imported "
            f"({type(error).__name__}: {error}): fix or uninstall it, or remove it from the setting plugins"
        ) from error


def _label(name: str, source: str) -> str:
    return f"{name} ({source})"


def _validate(model: type[ModelT], raw: Mapping[str, Any], settings: Settings, prefix: str) -> ModelT:
    """Return the settings of a component. Raises :class:`SettingsError`, which names the key."""
    try:
        return model.model_validate(dict(raw))
    except ValidationError as error:
        raise SettingsError(explain(error, model, settings.at, prefix)) from error


def _resolve(key: str, find: Callable[[str], Found], name: str, settings: Settings) -> Found:
    try:
        return find(name)
    except SettingsError as error:
        raise SettingsError(f"{settings.at(key)}: {error}") from error


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
        plugins.peer_codecs(settings)
    with collected(problems):
        tiers = plugins.tier_settings(settings)
    return Loaded(settings, plugins, tiers, problems)
