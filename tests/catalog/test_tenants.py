"""Tenants share a tier: shares, maxima, weights, and clients that want more than their share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.catalog import kvtier_eviction_policies
from kvtier.catalog.catalog import Catalog, State
from kvtier.catalog.eviction import ChunkColumns, EvictionPolicy, PolicySettings, RemovalReason
from kvtier.catalog.hints import ChunkHints
from kvtier.catalog.policies.lru import LruPolicy
from kvtier.catalog.policies.resume import ResumePolicy
from kvtier.catalog.policies.tinylfu import TinyLfuPolicy
from kvtier.catalog.tenants import EvictionScope, Quota, TenantPolicies, Tenants, Usage, tenant_of_salt
from kvtier.memory.keys import ChunkKey
from kvtier.settings.tenants import OTHER
from kvtier.testing.eviction import EvictionConformance

LENGTH = 10
ROOM = 100
"""Chunks that eviction leaves in the tier."""
READY = State.READY
QUOTAS = {"a": Quota(0.3, 0.5, 2.0), "b": Quota(0.2, 1.0, 1.0), "c": Quota(0.0, 0.4, 1.0)}


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "little"))


class Recording(LruPolicy):
    """Notes what is reported of prompts and their answers."""

    def __init__(self, settings: PolicySettings, capacity_bytes: int, chunks: ChunkColumns) -> None:
        super().__init__(settings, capacity_bytes, chunks)
        self.reported: list[tuple[object, ...]] = []
        self.expected: list[int] = []

    def missed(self, keys: Sequence[ChunkKey], now: float) -> None:
        self.reported.append((list(keys),))

    def answer_ended(
        self, rows: Sequence[int], keys: Sequence[ChunkKey], now: float, signature: Sequence[int]
    ) -> None:
        self.reported.append((list(rows), list(keys), tuple(signature)))

    def returning(self, now: float) -> list[int]:
        return self.expected


class Shared:
    """A catalog whose tiers tenants share, and the memory pressure of :meth:`store`."""

    def __init__(
        self,
        quotas: dict[str, Quota] = QUOTAS,
        tiers: int = 1,
        names: dict[str, str] | None = None,
        policy: type[EvictionPolicy] = LruPolicy,
    ) -> None:
        self.tenants = Tenants({name: name for name in quotas} if names is None else names)
        make = self.tenants.policy(lambda _: policy.factory(), quotas, ROOM * LENGTH)
        self.catalog = Catalog([make] * tiers)
        self.stored = 0

    def policy(self, tier: int = 0) -> TenantPolicies:
        policy = self.catalog.policies[tier]
        assert isinstance(policy, TenantPolicies)
        return policy

    def of_tenant(self, tenant: str, tier: int = 0) -> Recording:
        policy = self.policy(tier).of_tenant(self.catalog.columns.hints.number(tenant))
        assert isinstance(policy, Recording)
        return policy

    def usage(self, tier: int = 0) -> dict[str, Usage]:
        return {usage.tenant: usage for usage in self.policy(tier).usage()}

    def chunks(self, tier: int = 0) -> dict[str, int]:
        return {name: usage.chunks for name, usage in self.usage(tier).items() if usage.chunks}

    def store(
        self, tenant: str, chunks: int = 1, parent: ChunkKey | None = None, **hints: float
    ) -> list[ChunkKey]:
        """Store a prompt, and make room for it as the pipeline does. Return its keys."""
        keys = [key(self.stored + number) for number in range(chunks)]
        self.stored += chunks
        for stored in keys:
            self.catalog.add(stored, 0, LENGTH, READY, parent, hints=ChunkHints(tenant, **hints))  # type: ignore[arg-type]
            parent = stored
        self.make_room()
        return keys

    def make_room(self) -> None:
        for _ in range(1000):
            excess = self.catalog.used(0) - ROOM * LENGTH
            if excess <= 0:
                break
            self.evict(self.catalog.victims(0, excess))
        else:
            raise AssertionError("nothing can be evicted")
        for _ in range(1000):
            over = self.policy().excess_bytes()
            if not over:
                return
            self.evict(self.catalog.victims(0, over, scope=EvictionScope.OVER_MAXIMUM))
        raise AssertionError("nothing of those above their maximum can be evicted")

    def evict(self, keys: Sequence[ChunkKey]) -> None:
        for victim in keys:
            self.catalog.remove(victim, 0)


def test_share_is_kept_and_the_rest_divided_by_weight() -> None:
    shared = Shared({"a": Quota(0.3, 1.0, 2.0), "b": Quota(0.2, 1.0, 1.0)})
    for _ in range(200):
        shared.store("a")
        shared.store("b")
        shared.store("")
    # Of the 50 beyond the shares: 25, 12.5 and 12.5.
    assert shared.chunks() == pytest.approx({"a": 55, "b": 32, OTHER: 13}, abs=1)
    for _ in range(500):
        shared.store("d")
    assert shared.chunks() == pytest.approx({"a": 55, "b": 32, OTHER: 13}, abs=1)


def test_a_search_for_all_spares_no_share() -> None:
    """At a shutdown, what only memory holds is written, whoever it belongs to and whatever is in use."""
    shared = Shared({"a": Quota(0.3)})
    mine, other = shared.store("a", 10), shared.store("", 1)
    shared.catalog.pin(other, None)
    assert shared.catalog.victims(0) == []
    assert sorted(shared.catalog.victims(0, scope=EvictionScope.ANY)) == sorted(mine)


def test_a_maximum_of_the_whole_room_is_left_to_the_watermarks() -> None:
    """Otherwise whoever has the tier alone would have to leave in small pieces from the low watermark on."""
    shared = Shared({"a": Quota(0.3, 0.5)})
    for number in range(ROOM + 20):
        shared.catalog.add(key(1000 + number), 0, LENGTH, READY)
    assert shared.policy().excess_bytes() == 0
    for number in range(60):
        shared.catalog.add(key(5000 + number), 0, LENGTH, READY, hints=ChunkHints("a"))
    assert shared.policy().excess_bytes() == 10 * LENGTH


def test_unused_share_is_lent_and_taken_back() -> None:
    shared = Shared({"a": Quota(0.6)})
    shared.store("", 150)
    assert shared.chunks() == {OTHER: ROOM}
    shared.store("a", 40)
    assert shared.chunks() == {"a": 40, OTHER: 60}
    shared.store("a", 40)
    shared.store("", 60)
    assert shared.chunks() == pytest.approx({"a": 80, OTHER: 20}, abs=1)
    assert shared.usage()[OTHER].evictions >= 130


def test_maximum_holds_while_there_is_room() -> None:
    shared = Shared()
    shared.store("c", 60)
    assert shared.chunks() == {"c": 40}
    assert shared.usage()["c"] == Usage("c", 0, 400, 400, 40, 0, 20)
    shared.store("", 60)
    assert shared.chunks() == {"c": 40, OTHER: 60}


class Step(NamedTuple):
    tenant: str
    chunks: int
    behind: int
    """0: a prompt of its own. Otherwise it continues a chunk that was stored so long ago, if still there."""
    use: int


steps = st.builds(
    Step,
    st.sampled_from(["a", "b", "c", "", "d", "e"]),
    st.integers(1, 30),
    st.integers(0, 40),
    st.integers(0, 99),
)


@pytest.mark.parametrize("policy", kvtier_eviction_policies().values())
@settings(max_examples=25, deadline=None)
@given(st.lists(steps, min_size=5, max_size=40))
def test_shares_maxima_and_order_hold_whatever_happens(
    policy: type[EvictionPolicy], history: list[Step]
) -> None:
    shared = Shared(policy=policy)
    catalog = shared.catalog
    order: list[ChunkKey] = []
    parents: dict[ChunkKey, ChunkKey] = {}
    for step in history:
        before = shared.usage()
        parent = order[-step.behind] if 0 < step.behind <= len(order) else None
        if parent is not None and parent not in catalog:
            parent = None
        for stored in (keys := shared.store(step.tenant, step.chunks, parent)):
            if parent is not None:
                parents[stored] = parent
            parent = stored
        order += keys
        after = shared.usage()
        assert catalog.used(0) <= ROOM * LENGTH
        for name, quota in QUOTAS.items():
            assert after[name].used_bytes <= quota.max * ROOM * LENGTH
            if name != step.tenant:  # What it holds is within its share: nothing of it was taken.
                share = quota.share * ROOM * LENGTH
                assert after[name].used_bytes >= min(before[name].used_bytes, share)
        held = [stored for stored in order if stored in catalog]
        assert sum(usage.chunks for usage in after.values()) == len(held) == catalog.count(0)
        assert sum(usage.used_bytes for usage in after.values()) == catalog.used(0)
        assert all(parents[stored] in catalog for stored in held if stored in parents)
        if held:
            catalog.touch(held[: step.use % len(held)])


def test_no_more_is_evicted_than_needed_however_late_the_leaf_comes() -> None:
    """TinyLFU offers parents first: they wait for the last chunk of the prompt, and most of them stay."""
    shared = Shared({"a": Quota(0.3)}, policy=TinyLfuPolicy)
    shared.store("", 90)
    shared.store("a", 15)
    assert shared.catalog.used(0) == ROOM * LENGTH


def test_guarantee_against_a_client_that_wants_everything() -> None:
    shared = Shared({"a": Quota(0.5)})
    valuable = shared.store("a", 50)
    for number in range(3000):
        shared.store(f"name-{number}", priority=100, retention=10 * 365 * 86_400, resume=0.0)
    assert shared.chunks() == {"a": 50, OTHER: 50}
    assert all(stored in shared.catalog for stored in valuable)


def test_names_of_clients_do_not_use_up_those_of_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.catalog.hints.MAX_TENANTS", 5)
    shared = Shared({"a": Quota(0.5)})
    for number in range(10):
        shared.store(f"name-{number}")
    shared.store("a", 3)
    assert shared.chunks() == {"a": 3, OTHER: 10}


def test_lookups_of_others_do_not_move_a_chunk() -> None:
    shared = Shared()
    stored, unowned, foreign = shared.store("a", 4), shared.store("", 3), shared.store("d", 2)
    for keys in (stored, unowned, foreign):
        rows = shared.catalog.prefix_rows(keys)[0]
        shared.catalog.set_hints(rows, ChunkHints("b"))
        shared.catalog.touch_rows(rows)
    # Those that belong to nobody belong to the first tenant who uses them.
    assert shared.chunks() == {"a": 4, "b": 3, OTHER: 2}
    assert [shared.usage()[name].hits for name in ("a", "b", OTHER)] == [4, 3, 2]
    shared.evict(shared.catalog.victims(0))
    assert shared.chunks() == {}


def test_copies_in_other_tiers_have_the_same_owner() -> None:
    shared = Shared(tiers=2)
    keys = shared.store("a", 4)
    shared.catalog.set_hints(shared.catalog.prefix_rows(keys)[0], ChunkHints("b"))
    shared.catalog.add_copies(keys, 1)
    shared.catalog.touch(keys)
    assert shared.chunks(1) == {"a": 4}
    assert (shared.usage(0)["a"].hits, shared.usage(1)["a"].hits) == (4, 0)
    shared.catalog.remove_all(keys, 0)
    shared.catalog.touch(keys)
    assert (shared.usage(0)["a"].hits, shared.usage(1)["a"].hits) == (4, 4)
    for stored in keys:
        shared.catalog.set_ready(stored, 1)
    shared.catalog.remove_all(keys, 1, RemovalReason.CLEARED)
    assert (shared.usage(0)["a"].evictions, shared.usage(1)["a"].evictions) == (4, 0)


def test_chunk_with_a_child_of_another_tenant() -> None:
    """It stays until the child goes, and counts for the tenant who needs it once nothing else can go."""
    shared = Shared({"a": Quota(0.5)})
    prefix = shared.store("", 99)
    shared.store("a", 1, prefix[-1])
    assert shared.chunks() == {"a": 1, OTHER: 99}
    for _ in range(20):
        shared.store("d")
    chunks = shared.chunks()
    assert chunks["a"] + chunks[OTHER] == ROOM
    catalog = shared.catalog
    assert all(stored in catalog for stored in prefix[: sum(stored in catalog for stored in prefix)])


def test_chunk_that_waited_for_a_child_stays_if_its_tenant_is_within_its_share_by_then() -> None:
    shared = Shared({"a": Quota(0.5, 1.0, 0.01)})
    [parent] = shared.store("a")
    [child] = shared.store("", 1, parent)
    own = [shared.store("a")[0] for _ in range(50)]
    others = [shared.store("")[0] for _ in range(48)]
    # `a` is the furthest above its share. It offers the parent, which waits for the child, and gives up one.
    assert shared.catalog.victims(0, 4 * LENGTH) == [own[0], child, *others[:1]]


def test_salts_have_names_that_do_not_reveal_them_and_may_be_aliases() -> None:
    name = tenant_of_salt("a secret")
    assert name.startswith("salt-")
    assert (len(name), "secret" in name) == (13, False)
    assert (tenant_of_salt(""), tenant_of_salt("another")) != ("", name)
    shared = Shared({"a": Quota(0.5)}, names={"a": "a", name: "a"})
    shared.store("a")
    shared.store(name)
    shared.store(tenant_of_salt("another"))
    assert shared.chunks() == {"a": 2, OTHER: 1}


def test_encoded_chunks_count_with_their_length_in_the_tier() -> None:
    tenants = Tenants({"a": "a"})
    make = tenants.policy(lambda _: LruPolicy.factory(), QUOTAS, ROOM * LENGTH)
    catalog = Catalog([make, make], encoded=[1])
    for tier in (0, 1):
        catalog.add(key(1), tier, LENGTH, READY, hints=ChunkHints("a"))
    catalog.resize(key(1), 1, 4)
    assert [policy.usage()[1].used_bytes for policy in tenants.tiers] == [LENGTH, 4]
    catalog.remove(key(1), 1)
    assert [policy.usage()[1].used_bytes for policy in tenants.tiers] == [LENGTH, 0]


def test_a_search_without_eviction_changes_no_order() -> None:
    """Each tenant's policy learns which of its chunks could leave."""
    shared = Shared(policy=ResumePolicy)
    for _ in range(4):
        for tenant in ("a", "b"):
            shared.store(tenant, 2)
    first = shared.catalog.victims(0, 8 * LENGTH)
    assert len(first) == 8
    assert shared.catalog.victims(0, 8 * LENGTH) == first


def test_search_takes_only_chunks_within_its_scope() -> None:
    shared = Shared({"a": Quota(0.5)})
    shared.store("a", 50)
    assert len(shared.catalog.victims(0)) == 50  # Nobody is above a share, so there is no one better.
    assert not shared.catalog.victims(0, scope=EvictionScope.ABOVE_SHARE)
    other = shared.store("", 10)
    assert shared.catalog.victims(0, scope=EvictionScope.ABOVE_SHARE) == other[::-1]
    shared.catalog.pin(other, None)
    assert not shared.catalog.victims(0)  # Those of `a` stay while others are above their share.


def test_what_a_prompt_misses_is_reported_to_the_policy_of_the_tenant_who_asks() -> None:
    """That one gets these chunks when they are stored."""
    shared = Shared(policy=Recording, names={"a": "a", "alias": "a", "b": "b"})
    missed = [[key(number)] for number in range(5)]
    for keys, tenant in zip(missed, ("a", "alias", "b", "unknown"), strict=False):
        shared.catalog.report_missed(keys, ChunkHints(tenant))
    shared.catalog.report_missed(missed[4])
    assert shared.of_tenant("a").reported == [(missed[0],), (missed[1],)]
    assert shared.of_tenant("b").reported == [(missed[2],)]
    assert shared.of_tenant("").reported == [(missed[3],), (missed[4],)]


def test_end_of_an_answer_is_reported_to_the_policy_that_has_its_chunks() -> None:
    """In all tiers, also in those that do not hold them; not if no tier does, as it is not known then."""
    shared = Shared(policy=Recording, tiers=2)
    prefix = shared.store("", 2)
    keys = shared.store("a", 2, prefix[-1])
    rows = [shared.catalog.row(stored) for stored in keys]
    answer = key(9999)  # Of the answer, and not stored.
    shared.catalog.report_answer_ended([keys[0], answer, keys[1]], (7,))
    ended = (rows, [keys[0], answer, keys[1]], (7,))
    assert [shared.of_tenant("a", tier).reported for tier in (0, 1)] == [[ended], [ended]]
    shared.catalog.report_answer_ended([answer], (7,))
    assert len(shared.of_tenant("a").reported) == 1
    assert [shared.of_tenant(name, tier).reported for name in ("", "b") for tier in (0, 1)] == [[]] * 4


def test_a_prompt_that_continues_that_of_another_tenant_ends_for_its_own() -> None:
    shared = Shared(policy=Recording)
    [shorter] = shared.store("b")
    [longer] = shared.store("a", 1, shorter)
    shared.catalog.report_answer_ended([shorter, longer], ())
    assert len(shared.of_tenant("a").reported) == 1
    assert shared.of_tenant("b").reported == []


def test_prompts_of_all_tenants_return() -> None:
    shared = Shared(policy=Recording, tiers=2)
    keys = {name: shared.store(name, 2) for name in ("a", "b", "")}
    for name, stored in keys.items():
        shared.of_tenant(name, 1).expected = shared.catalog.prefix_rows(stored)[0][-1:]
    assert sorted(shared.catalog.returning(9)) == sorted(keys.values())


def test_more_tenants_than_the_limit_are_an_error() -> None:
    with pytest.raises(ValueError, match="at most 64"):
        Tenants({str(number): str(number) for number in range(65)})


class TestTenants(EvictionConformance):
    """Chunks of one owner leave in the order of the policy."""

    policy = LruPolicy

    def make_catalog(self) -> Catalog:
        """Return an empty catalog of two tiers that tenants share."""
        tenants = Tenants({"b": "b"})
        make = tenants.policy(lambda _: self.policy.factory(), {"b": Quota(0.1)}, self.capacity)
        return Catalog([make] * 2)


class TestTenantsWhosePromptsEnd(TestTenants):
    """Ends of answers reach the policy of the owner."""

    policy = ResumePolicy
