"""kvtier's connector with faults that no checksum shows."""

from __future__ import annotations

from typing import Any

from kvtier.integrations.vllm import adapters, worker
from kvtier.integrations.vllm.connector import KVTierConnector


class BlindConnector(KVTierConnector):
    """Takes each adapter for the same, whatever its files contain."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        adapters.fingerprint = lambda *_: "the same"
        super().__init__(*arguments, **named)


class SwappedConnector(KVTierConnector):
    """Stores the layers in another order than the layout says."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        views = worker.page_views

        def swapped(*arguments: Any) -> Any:
            return [pages[::-1] for pages in views(*arguments)]

        worker.page_views = swapped
        super().__init__(*arguments, **named)
