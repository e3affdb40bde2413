"""Two workers share the tests: one runs the real vLLM engines, the other what is left, and both what remains.

Files stay whole, so that what a module's tests share is made once. Engines stay together and come first: they
take the longest, and two at once would take each other's processors.

With ``--reruns`` a failed test is run again, and listed at the end with its first failure: a test that needs
a second attempt has a defect, or the software has, even if that attempt passes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

ENGINES = ("tests/vllm/", "tests/integrations/", "tests/demo/")
SHOWN_LINES = 60
"""Of each first failure, its end: it may not come again."""


class _Sharing(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        """What stays together with this test."""
        path = nodeid.partition("::")[0]
        return "engines" if path.startswith(ENGINES) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Sharing:  # noqa: ANN401 - as xdist has it
    """How the tests are shared, where there are several workers."""
    return _Sharing(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put first those that take longest."""
    items.sort(key=lambda item: not item.nodeid.startswith(ENGINES))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None, None, None]:
    """List the tests that were run again, below everything else."""
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
    """Where a test failed, and the first line of what was raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        lines = report.longreprtext.strip().splitlines()
        return lines[-1] if lines else "no reason given"
    return f"{crash.path}:{crash.lineno}: {crash.message.partition(chr(10))[0]}"
