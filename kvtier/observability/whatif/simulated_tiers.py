"""The tiers of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from kvtier.catalog.catalog import Catalog
from kvtier.errors import SettingsError
from kvtier.plugins import Plugins
from kvtier.settings import LocalTierSettings, Settings, TierSettings
from kvtier.tiers.level import Level
from kvtier.tiers.tenants import configured_tenants, shared_policy

GB = 1e9
MEMORY_GB_S, DISK_GB_S, OTHER_GB_S = 20.0, 3.0, 1.0
DEFAULT_GB_S = {"cpu": MEMORY_GB_S, "hugepage": MEMORY_GB_S, "disk": DISK_GB_S}
"""What common media read, by tier type. All others: :data:`OTHER_GB_S`."""
ONE_TIER = "ram"


@dataclass(frozen=True, slots=True)
class SimulatedTiers:
    """The tiers to simulate, fastest first, and what their settings imply."""

    settings: Sequence[TierSettings]
    gb_s: Sequence[float]
    """How fast each is read."""
    cache: Settings
    """The settings of the cache, for what is not a tier's own."""
    label: str
    """What distinguishes them from others: policy or policies."""

    @property
    def names(self) -> list[str]:
        """The names of the tiers."""
        return [tier.name for tier in self.settings]

    @property
    def capacity(self) -> int | None:
        """Bytes of all tiers together; ``None`` with a shared pool, whose capacity is unknown."""
        capacities = [tier.capacity for tier in self.settings if isinstance(tier, LocalTierSettings)]
        return sum(capacities) if len(capacities) == len(self.settings) else None


class SimulatedTier(Level):
    """A level without a medium. It reads as fast as it is told, however many requests do."""

    def __init__(self, index: int, settings: TierSettings, catalog: Catalog, gb_s: float) -> None:
        super().__init__(index, settings, catalog)
        self._bytes_per_second = gb_s * GB

    def cost(self, length: int) -> float:
        """Return the seconds to read ``length`` bytes."""
        return length / self._bytes_per_second


def one_tier(plugins: Plugins, policy: str, capacity: int, speeds: Mapping[str, float]) -> SimulatedTiers:
    """Return a single memory tier, which is used up to its capacity, without watermarks.

    Raises :class:`SettingsError`, which lists the known policies.
    """
    settings = Settings(
        tiers=[
            {
                "name": ONE_TIER,
                "type": "cpu",
                "capacity": capacity,
                "eviction": policy,
                "high_watermark": 1.0,
                "low_watermark": 1.0,
            }
        ]
    )
    return configured(plugins, settings, policy, speeds)


def configured(
    plugins: Plugins, settings: Settings, policy: str | None, speeds: Mapping[str, float]
) -> SimulatedTiers:
    """Return the tiers of settings. ``policy`` replaces that of every tier of this host.

    ``speeds``: GB/s by name; tiers without one get that of their type. Raises :class:`SettingsError`, which
    names the key.
    """
    tiers = plugins.tier_settings(settings)
    if policy is not None:
        plugins.eviction(policy)
        tiers = [
            tier.model_copy(update={"eviction": {"type": policy}})
            if isinstance(tier, LocalTierSettings)
            else tier
            for tier in tiers
        ]
    gb_s = [speeds.get(tier.name, DEFAULT_GB_S.get(tier.type, OTHER_GB_S)) for tier in tiers]
    return SimulatedTiers(tiers, gb_s, settings, policy or _label(tiers))


def _label(tiers: Sequence[TierSettings]) -> str:
    policies = [tier.eviction["type"] for tier in tiers if isinstance(tier, LocalTierSettings)]
    return ", ".join(dict.fromkeys(policies))


def make_catalog(plugins: Plugins, tiers: SimulatedTiers, clock: Clock) -> Catalog:
    """Return an empty catalog. Raises :class:`SettingsError` if a policy's settings are invalid."""
    tenants = configured_tenants(tiers.cache)
    try:
        policies = [shared_policy(plugins.policy, tier, tiers.cache, tenants) for tier in tiers.settings]
        return Catalog(policies, clock=clock.read)
    except ValidationError as error:
        raise SettingsError(f"{tiers.label}: {error}") from error


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0
        """In seconds."""

    def read(self) -> float:
        """Return the time."""
        return self.now
