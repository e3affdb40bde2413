"""Checks of ``kvtier doctor`` on what runs: the cache process, its engines, and a fleet of instances."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from kvtier.bridge import client
from kvtier.bridge.spawn import default_address
from kvtier.cli.checks import Check
from kvtier.errors import ChannelError, ControllerError
from kvtier.settings import Settings, TierSettings
from kvtier.version import __version__

PROCESS, FOUND, FLEET = "cache process", "found while running", "instances"
KEY = "VLLM_API_KEY"
REMEDIES = {
    "store": "kvtier status: is the tier full or unavailable? vLLM's log: is the cache process connected?",
    "lookup": "kvtier status: is the tier too small? Do all engines and ranks use one cache process?",
    "load": "see the warnings of the cache process and of vLLM; kvtier doctor --backend all",
    "tokens": "stop using this tier, and clear it: this is a bug, in kvtier or below it",
}
"""For each stage at which what a canary has stored is lost."""
START = "start one: kvtier serve"
ELSEWHERE = (
    "is the first in `peer.others` of the second, the second in `kv_transfer.targets` of the first, or have "
    "both a controller or a pool? Are model, weights and layout equal? kvtier doctor on both hosts"
)


def check_cache_process(
    settings: Settings, tiers: Sequence[TierSettings], socket: Path | None = None
) -> Iterator[Check]:
    """Check the cache process of these settings, or that on a ``socket``, and what it has found.

    Blocks for up to some seconds.
    """
    try:
        apart = socket or settings.socket
        socket = apart or default_address(settings)
        if not socket.exists():
            if apart:
                yield Check(PROCESS, "warn", f"none on {socket}; engines start none there", START)
            else:
                yield Check(PROCESS, "ok", f"none on {socket}; an engine starts one")
            return
        report = client.status(socket)
    except ChannelError as error:
        yield Check(PROCESS, "warn", str(error), f"see its log, or {START}")
        return
    found, problem = f"process {report['pid']} on {socket}", ""
    version, named = report.get("version", "before 0.3"), [tier.name for tier in tiers]
    # A cache process adds a tier for its peers.
    running = [tier["name"] for tier in report["tiers"]][: len(named)]
    if version != __version__:
        problem = f", with kvtier {version}: {__version__} is installed"
    elif running != named:
        problem = f", with other tiers than in the settings: {', '.join(running)}"
    remedy = f"kill {report['pid']}: the next one has these" if problem else ""
    yield Check(PROCESS, "warn" if problem else "ok", found + problem, remedy)
    for finding in report.get("findings", ()):
        yield Check(FOUND, "warn", finding["found"], finding["remedy"])


def check_fleet(settings: Settings) -> Iterator[Check]:
    """Check each controller of the settings, and what one of them has found. Blocks for some seconds each."""
    from kvtier.cli.controller_api import ControllerAPI

    secret = settings.controller.token
    token = None if secret is None else secret.get_secret_value()
    found = None
    for url in settings.controller.urls:
        try:
            with ControllerAPI([url], token) as api:
                found = api.instances().instances, api.findings().findings
        except ControllerError as error:
            yield Check("controller", "fail", str(error))
    if found is None:
        return
    instances, findings = found
    for finding in findings:
        yield Check(FLEET, "warn", finding.found, finding.remedy)
    if not findings:
        yield Check(FLEET, "ok", f"{len(instances)}, with the same version, and the same KV for each model")


def check_engines(urls: Sequence[str]) -> list[Check]:
    """Have each engine store a prompt and its tiers serve it; then the others load what the first one stores.

    Blocks for up to a minute a request.
    """
    from kvtier.observability.canary import Canary, CanaryError

    async def check(name: str, engine: Canary, writer: Canary | None = None) -> Check:
        try:
            result = await engine.run(writer)
        except CanaryError as error:
            return Check(name, "fail", str(error), f"check the URL, and {KEY} if the server has an API key")
        if result.stage is None:
            return Check(name, "ok", f"{result.describe()}; equal tokens")
        elsewhere = writer is not None and result.stage == "lookup"
        return Check(name, "fail", result.describe(), ELSEWHERE if elsewhere else REMEDIES[result.stage])

    async def run() -> list[Check]:
        async with AsyncExitStack() as stack:
            engines = [await stack.enter_async_context(Canary(url, os.environ.get(KEY))) for url in urls]
            checks = [await check(f"engine {engine.url}", engine) for engine in engines]
            if all(found.status == "ok" for found in checks):
                for engine in engines[1:]:
                    name = f"{engine.url} loads what {engines[0].url} stores"
                    checks.append(await check(name, engine, engines[0]))
            return checks

    try:
        return anyio.run(run)
    except CanaryError as error:
        return [Check("engines", "fail", str(error), f"correct {KEY}")]
