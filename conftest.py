"""Distribution of the tests over workers, and a report of tests that needed a rerun.

All tests of a file run on one worker, so that module fixtures are created once. Tests with real vLLM engines
run on one worker and first: they take the longest, and two engines at once would compete for CPUs. The other
workers run the remaining tests; in the end all do. On two cores, three workers are a fifth faster than two,
because many tests wait for servers.

With ``--reruns``, a failed test is repeated, and the summary lists it with its first failure: a test that
passes only on its second attempt still shows a defect, of the test or of the software.

With ``--part 2/4``, only the tests of one part run. Every test belongs to exactly one, by a hash of its name:
other tests that come or go do not move it.
"""

from __future__ import annotations

import argparse
import atexit
import gc
import hashlib
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Timings never decide a test: on a saturated machine any example may take a second.
settings.register_profile("kvtier", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvtier")

ENGINES = ("tests/vllm/", "tests/lab/demo/")
SHOWN_LINES = 60
"""Last lines shown of each first failure, which may not be reproducible."""


class _FileScheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        """Return the scope of a test; tests of the same scope run on the same worker."""
        path = nodeid.partition("::")[0]
        return "engines" if path.startswith(ENGINES) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _FileScheduling:  # noqa: ANN401 - as xdist has it
    """Return the scheduler that distributes the tests over workers."""
    return _FileScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--part``."""
    parser.addoption("--part", type=_part, default=(1, 1), metavar="K/N", help="run only the K-th of N parts")


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part: write 2/4 for the second of four")
    return int(part), int(parts)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests of ``--part``, and move the slowest to the front."""
    part, parts = config.getoption("part")
    others = [item for item in items if _hash(item.nodeid) % parts != part - 1]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if _hash(item.nodeid) % parts == part - 1]
    items.sort(key=lambda item: not item.nodeid.startswith(ENGINES))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported and collected out of garbage collections: with torch, millions of objects.

    Garbage collections take a third of its time. Later ones take a second with those objects, and many
    tests ask for them, to find what leaks.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        # Otherwise libraries report leaks when the process exits.
        atexit.register(gc.unfreeze)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """List the tests that were run again, at the end of the summary."""
    yield
    stats = terminalreporter.stats
    first = {report.nodeid: report for report in reversed(stats.get("rerun", []))}
    if not first:
        return
    for nodeid, report in first.items():
        terminalreporter.section(f"first failure of {nodeid}", sep="-")
        terminalreporter.write_line("\n".join(report.longreprtext.splitlines()[-SHOWN_LINES:]))
    failed = {report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])}
    terminalreporter.section(f"{len(first)} run again", red=bool(failed), yellow=not failed)
    for nodeid, report in first.items():
        then = "failed again" if nodeid in failed else "passed then"
        terminalreporter.write_line(f"{nodeid} ({then})\n    {_first_line(report)}")


def _first_line(report: pytest.TestReport) -> str:
    """Return where a test failed, and the first line of its error."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        lines = report.longreprtext.strip().splitlines()
        return lines[-1] if lines else "no reason given"
    return f"{crash.path}:{crash.lineno}: {crash.message.partition(chr(10))[0]}"
