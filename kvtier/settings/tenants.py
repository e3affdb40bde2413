"""Settings of tenants: how the room of the tiers is divided among them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from kvtier.settings.values import Secret, SettingsModel
from kvtier.units import Fraction, Number

OTHER = "other"
"""The name that stands for everyone who is not configured."""
MAX_TENANTS = 64
"""Limit of configured tenants: each has an eviction policy in each tier, of 8 bytes and more per chunk."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,63}")
_ROUNDING = 1e-9


class TenantSettings(SettingsModel):
    """What one tenant may hold of a tier: fractions of what eviction leaves in use there."""

    share: Number = Field(
        default=0.0,
        ge=0,
        le=1,
        description="Fraction of a tier that is never taken from this tenant for others.",
        examples=[0.3],
    )
    max: Fraction = Field(
        default=1.0, description="Fraction of a tier that it holds at most.", examples=[0.5]
    )
    weight: Number = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Its part of the room beyond all shares, relative to that of others who want it.",
        examples=[2],
    )
    salt: Secret | None = Field(
        default=None,
        description="The `cache_salt` of its requests, for those that name no tenant.",
        examples=["{env: TEAM_A_SALT}"],
    )

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.share > self.max:
            raise ValueError(f"the share {self.share:g} is above the max {self.max:g}: use at most that")
        return self


class TierTenantSettings(SettingsModel):
    """What differs for a tenant in one tier."""

    share: Number | None = Field(default=None, ge=0, le=1, description="In place of the tenant's `share`.")
    max: Fraction | None = Field(default=None, description="In place of the tenant's `max`.")
    weight: Number | None = Field(
        default=None, gt=0, le=1000, description="In place of the tenant's `weight`."
    )


def _check_tenants(tenants: dict[str, TenantSettings]) -> dict[str, TenantSettings]:
    if len(tenants.keys() - {OTHER}) > MAX_TENANTS:
        raise ValueError(f"{len(tenants)} tenants: configure at most {MAX_TENANTS}")
    by_salt: dict[str, str] = {}
    for name, tenant in tenants.items():
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a name of a tenant: use up to 64 letters, digits and ._:@/-")
        if tenant.salt is None:
            continue
        if name == OTHER or not tenant.salt.get_secret_value():
            raise ValueError(f"{name}.salt is not possible: remove it, or set that of one tenant")
        same = by_salt.setdefault(tenant.salt.get_secret_value(), name)
        if same != name:
            raise ValueError(f"{name}.salt is also that of {same}: set different ones")
    _check_shares(tenants)
    return tenants


def _check_shares(tenants: Mapping[str, TenantSettings]) -> None:
    total = sum(tenant.share for tenant in tenants.values())
    if total > 1 + _ROUNDING:
        parts = " + ".join(f"{tenant.share:g}" for tenant in tenants.values() if tenant.share)
        raise ValueError(f"the shares are {parts} = {total:g}: use at most 1 in total")


Tenants = Annotated[dict[str, TenantSettings], AfterValidator(_check_tenants)]
"""The configured tenants by name."""


def tenants_of_tier(
    tenants: Mapping[str, TenantSettings], own: Mapping[str, TierTenantSettings]
) -> dict[str, TenantSettings]:
    """Return the settings of all tenants in a tier, given its ``own``.

    Raises ``ValueError``, which names the tenant and what to change.
    """
    if unknown := [name for name in own if name not in tenants]:
        known = ", ".join(tenants) or "none"
        raise ValueError(f"{unknown[0]} is not one of the tenants ({known}): add it to the setting tenants")
    both = {
        name: tenant.model_copy(update=own[name].model_dump(exclude_none=True)) if name in own else tenant
        for name, tenant in tenants.items()
    }
    for name, tenant in both.items():
        if tenant.share > tenant.max:
            raise ValueError(
                f"{name} has the share {tenant.share:g} and the max {tenant.max:g} in this tier: "
                "use a share of at most the max"
            )
    _check_shares(both)
    return both
