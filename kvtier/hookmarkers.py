"""The two markers of plugin hooks, for :mod:`kvtier.hookspecs` and what implements its hooks."""

from __future__ import annotations

import pluggy

PROJECT = "kvtier"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Mark a function as the implementation of the hook with the same name."""
