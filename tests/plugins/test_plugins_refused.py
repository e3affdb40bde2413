"""Invalid plugins and their error messages."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvtier import hookimpl
from kvtier.backends.cpu import CpuBackend
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.errors import PluginError, SettingsError
from kvtier.events import Observer
from kvtier.plugins import Plugins
from kvtier.settings import Settings
from kvtier.tiers.codec import IdentityCodec


def plugin(**hooks: Any) -> ModuleType:
    """Return a module with these functions as hooks."""
    module = ModuleType("mine")
    vars(module).update({name: hookimpl(function) for name, function in hooks.items()})
    return module


@pytest.fixture
def plugins() -> Plugins:
    return Plugins.load([])


def test_built_in_names_use_the_same_hooks(plugins: Plugins) -> None:
    assert plugins.backend("cpu") is CpuBackend
    assert plugins.eviction("lru") is LruPolicy
    assert {loaded.source for loaded in plugins.loaded()} == {"built in"}


def test_two_plugins_with_the_same_name(plugins: Plugins) -> None:
    plugins.register(plugin(), "mine", "mine 1")
    with pytest.raises(PluginError, match="two plugins are named 'mine': mine 1 and yours 2"):
        plugins.register(plugin(), "mine", "yours 2")


def returning(value: object) -> Callable[[], object]:
    return lambda: value


def codec(code: object) -> Callable[[], object]:
    return returning({"broken": type("Broken", (IdentityCodec,), {"code": code})})


@pytest.mark.parametrize(
    ("hook", "function", "message"),
    [
        (
            "kvtier_backends",
            returning({"cpu": CpuBackend}),
            "kvtier.backends (built in) and mine (mine 1) both provide 'cpu'",
        ),
        (
            "kvtier_backend",
            returning({}),
            "mine (mine 1) does not match kvtier's hooks: unknown hook 'kvtier_backend'",
        ),
        ("kvtier_observers", lambda settings, more: [], "mine (mine 1) does not match kvtier's hooks: "),
        (
            "kvtier_backends",
            lambda: 1 / 0,
            "mine (mine 1) failed in kvtier_backends: ZeroDivisionError: division by zero",
        ),
        *(
            ("kvtier_backends", returning(result), "kvtier_backends must return a dict from names to classes")
            for result in ([CpuBackend], {"a": "CpuBackend"}, {"a": None})
        ),
        *(
            ("kvtier_codecs", codec(code), "the codec 'broken' of mine has no code from 1 to 65535")
            for code in (-1, 65_536, "x", None)
        ),
    ],
)
def test_invalid_hook_is_refused(
    plugins: Plugins, hook: str, function: Callable[..., object], message: str
) -> None:
    with pytest.raises(PluginError, match=re.escape(message)):
        plugins.register(plugin(**{hook: function}), "mine", "mine 1")


class First(IdentityCodec):
    code = 7


class Second(IdentityCodec):
    code = 7


def test_two_codecs_with_the_same_code(plugins: Plugins) -> None:
    plugins.register(plugin(kvtier_codecs=lambda: {"first": First}), "one", "one 1")
    with pytest.raises(PluginError, match="the codecs 'first' and 'second' have the same code 7"):
        plugins.register(plugin(kvtier_codecs=lambda: {"second": Second}), "two", "two 1")


@pytest.mark.parametrize("returned", [7, [object()]], ids=["no list", "no observer"])
def test_observers_that_are_none(plugins: Plugins, returned: object) -> None:
    plugins.register(plugin(kvtier_observers=lambda settings: returned), "mine", "mine 1")
    with pytest.raises(PluginError, match=r"plugin .*mine.*: .* a list of observers, .* subclasses of"):
        plugins.observers(Settings())


class Idle(Observer):
    """Ignores everything."""


def test_observers_of_all_plugins_are_collected(plugins: Plugins) -> None:
    first, second = Idle(), Idle()
    plugins.register(plugin(kvtier_observers=lambda settings: [first]), "one", "one 1")
    plugins.register(plugin(kvtier_observers=lambda settings: iter([second])), "two", "two 1")
    assert plugins.observers(Settings()) == [first, second]


def test_unknown_transport_is_refused(plugins: Plugins) -> None:
    with pytest.raises(SettingsError, match=r"unknown transport 'pigeon'"):
        plugins.transport("pigeon")


def test_plugin_without_hooks_provides_nothing(plugins: Plugins) -> None:
    plugins.register(plugin(), "mine", "mine 1")
    assert plugins.loaded()[-1] == ("mine", "mine 1", (), ())
