"""What a plugin must not do, and what is said then."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from kvtier.backends.cpu import CpuBackend
from kvtier.errors import PluginError, SettingsError
from kvtier.eviction.lru import LruPolicy
from kvtier.hookspecs import hookimpl
from kvtier.plugins import Plugins
from kvtier.settings import Settings


def plugin(**hooks: Any) -> ModuleType:
    """A module with these functions as hooks."""
    module = ModuleType("mine")
    vars(module).update({name: hookimpl(function) for name, function in hooks.items()})
    return module


@pytest.fixture
def plugins() -> Plugins:
    return Plugins.load([])


def test_what_is_built_in_comes_by_the_same_hooks(plugins: Plugins) -> None:
    assert plugins.backend("cpu") is CpuBackend
    assert plugins.eviction("lru") is LruPolicy
    assert {loaded.source for loaded in plugins.loaded()} == {"built in"}


def test_a_claim_on_a_built_in_name(plugins: Plugins) -> None:
    mine = plugin(kvtier_backends=lambda: {"cpu": CpuBackend})
    with pytest.raises(
        PluginError, match=r"kvtier\.backends \(built in\) and mine \(mine 1\) both provide 'cpu'"
    ):
        plugins.register(mine, "mine", "mine 1")


def test_two_plugins_of_one_name(plugins: Plugins) -> None:
    plugins.register(plugin(), "mine", "mine 1")
    with pytest.raises(PluginError, match="two plugins are called 'mine': mine 1 and yours 2"):
        plugins.register(plugin(), "mine", "yours 2")


def test_a_hook_that_does_not_exist(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match=r"mine \(mine 1\) does not fit kvtier's hooks: .*kvtier_backend"):
        plugins.register(plugin(kvtier_backend=lambda: {"a": CpuBackend}), "mine", "mine 1")


def test_a_hook_with_other_arguments(plugins: Plugins) -> None:
    with pytest.raises(PluginError, match="does not fit kvtier's hooks"):
        plugins.register(plugin(kvtier_observers=lambda settings, more: []), "mine", "mine 1")


def test_a_hook_that_fails(plugins: Plugins) -> None:
    def fail() -> None:
        raise ZeroDivisionError("oh")

    with pytest.raises(
        PluginError, match=r"mine \(mine 1\) failed in kvtier_backends: ZeroDivisionError: oh"
    ):
        plugins.register(plugin(kvtier_backends=fail), "mine", "mine 1")


@pytest.mark.parametrize("answer", [[CpuBackend], {"a": "CpuBackend"}, {"a": None}])
def test_an_answer_that_is_not_classes_by_name(plugins: Plugins, answer: object) -> None:
    with pytest.raises(PluginError, match="kvtier_backends must return a dict from names to classes"):
        plugins.register(plugin(kvtier_backends=lambda: answer), "mine", "mine 1")


def test_observers_that_are_no_list(plugins: Plugins) -> None:
    plugins.register(plugin(kvtier_observers=lambda settings: 7), "mine", "mine 1")
    with pytest.raises(PluginError, match="kvtier_observers must return observers in a list"):
        plugins.observers(Settings())


def test_observers_of_all_plugins_are_gathered(plugins: Plugins) -> None:
    one, two = object(), object()
    plugins.register(plugin(kvtier_observers=lambda settings: [one]), "one", "one 1")
    plugins.register(plugin(kvtier_observers=lambda settings: iter([two])), "two", "two 1")
    assert plugins.observers(Settings()) == [one, two]


def test_an_unknown_transport_where_there_are_none(plugins: Plugins) -> None:
    with pytest.raises(SettingsError, match=r"there is no transport 'pigeon'"):
        plugins.transport("pigeon")


def test_a_plugin_without_a_hook_provides_nothing(plugins: Plugins) -> None:
    plugins.register(plugin(), "mine", "mine 1")
    assert plugins.loaded()[-1] == ("mine", "mine 1", (), ())
