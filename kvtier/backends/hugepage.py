"""Host memory in huge pages: fewer page faults and TLB misses, and faster registration with network cards."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvtier.arena import Arena
from kvtier.backends.cpu import MemoryBackend
from kvtier.settings import LocalTierSettings, TierSettings


class HugePageSettings(LocalTierSettings):
    """Settings of a tier of type ``hugepage``."""

    fallback: bool = Field(
        default=True,
        description=(
            "Take normal pages, with a warning, where the system has not enough free huge pages. "
            "`false`: do not start then."
        ),
        examples=[False],
    )


class HugePageBackend(MemoryBackend):
    """Host memory in pages of 2 MiB. The system administrator sets them aside: ``sysctl vm.nr_hugepages``."""

    settings_type: ClassVar[type[TierSettings]] = HugePageSettings

    def __init__(self, settings: HugePageSettings) -> None:
        super().__init__(settings)
        self._fallback = settings.fallback

    def _make_arena(self) -> Arena:
        return Arena.create(self._settings.capacity, huge=True, fallback=self._fallback)
