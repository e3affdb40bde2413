"""Host memory in huge pages: fewer page faults and TLB misses, faster registration with network cards."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from kvtier.backends.cpu import MemoryBackend
from kvtier.memory.arena import Arena
from kvtier.settings import LocalTierSettings, TierSettings


class HugePageSettings(LocalTierSettings):
    """Settings of a tier of type ``hugepage``."""

    fallback: bool = Field(
        default=True,
        description=(
            "Fall back to normal pages, with a warning, if the system does not have enough free huge pages. "
            "`false`: refuse to start."
        ),
        examples=[False],
    )


class HugePageBackend(MemoryBackend):
    """Host memory in pages of 2 MiB, which the administrator reserves with ``sysctl vm.nr_hugepages``."""

    settings_type: ClassVar[type[TierSettings]] = HugePageSettings

    def __init__(self, settings: HugePageSettings) -> None:
        super().__init__(settings)
        self._fallback = settings.fallback

    def _make_arena(self) -> Arena:
        return Arena.create(self._settings.capacity, huge=True, fallback=self._fallback)
