"""The tenants of the settings, for the catalog."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtier.catalog.eviction import MakePolicy
from kvtier.catalog.tenants import Quota, Tenants, tenant_of_salt
from kvtier.settings import LocalTierSettings, Settings, TierSettings
from kvtier.settings.tenants import tenants_of_tier
from kvtier.tiers.level import Level


def tenant_names(settings: Settings) -> dict[str, str]:
    """Return the name of the configured tenant by each name that requests use for it."""
    names = {name: name for name in settings.tenants}
    for name, tenant in settings.tenants.items():
        if tenant.salt is not None:
            names[tenant_of_salt(tenant.salt.get_secret_value())] = name
    return names


def configured_tenants(settings: Settings) -> Tenants | None:
    """Return the tenants that share the local tiers; ``None`` if no tenant is configured."""
    return Tenants(tenant_names(settings)) if settings.tenants else None


def shared_policy(
    policy: Callable[[TierSettings], MakePolicy],
    tier: TierSettings,
    settings: Settings,
    tenants: Tenants | None,
) -> MakePolicy:
    """Return what creates the eviction policy of a tier, or those of its tenants.

    ``policy`` returns what creates the policy that the settings of a tier name. Shared pools are not divided.
    """
    if tenants is None or not isinstance(tier, LocalTierSettings):
        return policy(tier)

    def policy_for(fraction: float) -> MakePolicy:
        return policy(tier.model_copy(update={"capacity": int(tier.capacity * fraction)}))

    of_tier = tenants_of_tier(settings.tenants, tier.tenants).items()
    quotas = {name: Quota(tenant.share, tenant.max, tenant.weight) for name, tenant in of_tier}
    return tenants.policy(policy_for, quotas, int(tier.capacity * tier.low_watermark))


def tenants_status(tiers: Sequence[Level]) -> list[dict[str, object]]:
    """Return what each configured tenant and all others have in each tier that they share, for display."""
    return [
        {"tier": tier.name, **usage._asdict()}
        for tier in tiers
        if tier.tenants is not None
        for usage in tier.tenants.usage()
    ]
