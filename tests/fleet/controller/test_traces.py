"""The controller's operations are traced, down to the tier I/O of the instances that execute them."""

from __future__ import annotations

from pathlib import Path

import httpx
import opentelemetry.exporter.otlp.proto.grpc.trace_exporter
import opentelemetry.sdk.trace.export  # noqa: F401 - the thread that exports would block the event loop
import pytest
from anyio import to_thread

from tests.rigs.collector import Collector
from tests.rigs.fleet import CHUNK_TOKENS, fleet

pytestmark = pytest.mark.anyio

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOKENS = list(range(4 * CHUNK_TOKENS))


async def test_a_copy_to_another_instance_is_one_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector = await to_thread.run_sync(Collector(tmp_path).start)
    try:
        for name, value in {**collector.environment(), "KVTIER_TRACES": "true"}.items():
            monkeypatch.setenv(name, value)
        async with fleet(tmp_path, None, "a", "b", traces=True) as running:
            await running.store("a", TOKENS)
            body = {
                "old_position": ["a", "ram"],
                "new_position": ["b", "ssd"],
                "tokens": TOKENS,
                "copy": True,
            }
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            async with httpx.AsyncClient(base_url=running.url, trust_env=False, headers=headers) as http:
                event = (await http.post("/move", json=body)).raise_for_status().json()["event_id"]
                done = (await http.get(f"/events/{event}", params={"wait": 60})).json()
                assert (done["state"], done["error"]) == ("done", None)
        spans = collector.spans
    finally:
        await to_thread.run_sync(collector.kill)
    [copy] = [span for span in spans if span.name == "kvtier.controller.copy"]
    assert (copy.trace, copy.parent, copy.service) == (TRACE, PARENT, "kvtier-controller")
    assert copy.attributes["kvtier.chunks"] == 4
    of_instances = [span for span in spans if span.parent == copy.id]
    assert {(span.name, span.attributes.get("kvtier.tier")) for span in of_instances} == {
        ("kvtier.tier.read", "peers"),
        ("kvtier.tier.write", "ssd"),
        ("kvtier.peer.serve", None),
    }
    assert {span.service for span in of_instances} == {"kvtier"}
    assert "kvtier.controller.lookup" in {span.name for span in spans}
    assert str(TOKENS)[1:20] not in collector.file.read_text()
