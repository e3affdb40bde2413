from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.observability.metrics.scraping import ScrapedCache, scraped_cache, settings


@pytest.fixture
async def scraped(tmp_path: Path) -> AsyncIterator[ScrapedCache]:
    """A cache with a memory and a disk tier."""
    async with scraped_cache(settings(tmp_path)) as scraped:
        yield scraped
