"""The pytest plugin that comes with kvtier. It does nothing until a project asks for it.

Every pytest run in an environment that has kvtier loads this module, vLLM users' own runs too: it imports
pytest and nothing else, and what it offers is loaded when it is used.

=========================  ======================================================================
``kvtier_checks = true``   in pytest's ini file, or :func:`enable_checks` from ``pytest_configure``:
                           tests on the event loop fail where they blocked it for more than 200 ms or
                           leave a task behind
``loop_may_block``         a marker: this test may block the loop, for the reason that it gives
``leak_check``             a fixture: fails where a lease on an arena made since is still open at the end
=========================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvtier.arena import Arena

pytest.register_assert_rewrite(
    "kvtier.testing.backend",
    "kvtier.testing.transport",
    "kvtier.testing.transport_faults",
    "kvtier.testing.transport_pair",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the ini option."""
    parser.addini(
        "kvtier_checks",
        "Fail tests on the event loop that block it for more than 200 ms or leave a task behind.",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, and load the checks where the project asks for them."""
    config.addinivalue_line("markers", "loop_may_block(reason): the test may block the event loop")
    if config.getini("kvtier_checks"):
        enable_checks(config)


def enable_checks(config: pytest.Config) -> None:
    """Check every test on the event loop of this run. Harmless when repeated."""
    from kvtier.testing import checks

    if not config.pluginmanager.is_registered(checks):
        config.pluginmanager.register(checks, "kvtier_checks")


@pytest.fixture
def leak_check(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arena]]:
    """Fail the test where an arena that was made during it has an open lease at its end, or none was made.

    Name it before the fixtures that make arenas, so that it outlives them. Its value is the list of these
    arenas.
    """
    from kvtier.arena import Arena

    arenas: list[Arena] = []
    create = Arena.create

    def recorded(capacity: int, *, huge: bool = False, fallback: bool = True) -> Arena:
        arenas.append(create(capacity, huge=huge, fallback=fallback))
        return arenas[-1]

    monkeypatch.setattr(Arena, "create", recorded)
    yield arenas
    if not arenas:
        pytest.fail("leak_check saw no arena: name it before the fixture that makes one", pytrace=False)
    for arena in arenas:
        if arena.leases:
            pytest.fail(f"{arena.leases} leases on {arena.used} bytes of an arena are open", pytrace=False)
