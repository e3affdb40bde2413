"""kvtier's pytest plugin. It does nothing unless a project enables it.

Every pytest run in an environment with kvtier loads this module, including vLLM users' own runs. So it
imports nothing but pytest, and loads its features on use.

=========================  ======================================================================
``kvtier_checks = true``   in pytest's ini file, or :func:`enable_checks` from ``pytest_configure``:
                           async tests fail if they block the event loop for more than 200 ms or
                           leave a task running
``loop_may_block``         marker: the test may block the event loop, for the given reason
``leak_check``             fixture: fails if a lease on an arena created by the test is open at the end
=========================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvtier.memory.arena import Arena

pytest.register_assert_rewrite(
    "kvtier.testing.backend",
    "kvtier.testing.codec",
    "kvtier.testing.eviction",
    "kvtier.testing.transport",
    "kvtier.testing.transport_sides",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option."""
    parser.addini(
        "kvtier_checks",
        "Fail async tests that block the event loop for more than 200 ms or leave a task running.",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and load the checks if the project enables them."""
    config.addinivalue_line("markers", "loop_may_block(reason): the test may block the event loop")
    if config.getini("kvtier_checks"):
        enable_checks(config)


def enable_checks(config: pytest.Config) -> None:
    """Check every async test of this run. Idempotent."""
    from kvtier.testing import checks

    if not config.pluginmanager.is_registered(checks):
        config.pluginmanager.register(checks, "kvtier_checks")


@contextmanager
def recorded_arenas() -> Iterator[list[Arena]]:
    """Yield a list of the arenas that are created within the block."""
    from kvtier.memory.arena import Arena

    arenas: list[Arena] = []
    create = Arena.create

    def recorded(capacity: int, *, huge: bool = False, fallback: bool = True) -> Arena:
        arenas.append(create(capacity, huge=huge, fallback=fallback))
        return arenas[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "create", recorded)
        yield arenas


@pytest.fixture
def leak_check() -> Iterator[list[Arena]]:
    """Fail the test if an arena created during it has an open lease at the end, or if it created no arena.

    Request it before the fixtures that create arenas, so that it outlives them. Its value is the list of
    these arenas.
    """
    with recorded_arenas() as arenas:
        yield arenas
    if not arenas:
        pytest.fail("leak_check saw no arena: request it before the fixture that creates one", pytrace=False)
    for arena in arenas:
        if arena.leases:
            pytest.fail(f"{arena.leases} leases on {arena.used} bytes of an arena are open", pytrace=False)
