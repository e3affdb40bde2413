"""State of one engine in the cache process: leases, reservations and lookups."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import TYPE_CHECKING

from msgspec import structs

from kvtier.bounded import remember
from kvtier.bridge.leases import PendingWrites, ReadLeases, Ticket
from kvtier.bridge.protocol import (
    MAX_RESERVED_CHUNKS,
    AnswerEnded,
    Explanation,
    Found,
    Hello,
    Outcome,
    Reserve,
    Reserved,
    Run,
    Weights,
)
from kvtier.bridge.protocol import Lookup as LookupRequest
from kvtier.cache import TieredCache
from kvtier.catalog.misses import AGAIN, Miss, MissReason
from kvtier.catalog.partial_matches import PromptTags
from kvtier.errors import CorruptChunk, ProtocolError
from kvtier.events import AnswerEnd
from kvtier.fleet.member.served_models import EngineModel
from kvtier.logs import Finding
from kvtier.memory.header import HEADER_BYTES, ChunkHeader, object_bytes
from kvtier.memory.keys import BLOCK_HASH_BYTES, KEY_BYTES, ChunkKey, split_keys
from kvtier.memory.layout import STATE_TOKENS
from kvtier.observability.breakers import Breakers, around
from kvtier.observability.requests import RequestLog, RequestReport
from kvtier.pipeline.found import FoundPrefix, Ready
from kvtier.pipeline.query import Expected, Query
from kvtier.tiers.host_memory import Reservation
from kvtier.units import format_size

if TYPE_CHECKING:
    from kvtier.observability.recording.recorder import Recorder
    from kvtier.peers.kv_transfer import KVTransfer as Transfer
    from kvtier.peers.staging.buffers import EngineStaging, Staging

NO_LEASE = 0
MAX_ASKED = 4096
"""Lookups of an engine whose outcome is awaited. Requests that are cancelled before they run have none."""
MAX_ENDED_SECONDS = 60.0
"""An answer that has ended longer ago counts as ended then. Usually it is reported in the next step."""
MIN_LENGTHS = 200
"""Prompts to look at before their typical length is known."""


@dataclass(slots=True)
class Asked:
    """A request whose outcome is awaited."""

    began_at: float
    """When it was first looked up."""
    hit_tokens: int = 0
    """How many of its tokens count as hits, whether or not they have arrived."""
    explanation: Explanation | None = None
    """Why chunks are missing, once known."""


class EngineSession:
    """Leases, reservations and lookups of one engine. They end with it.

    Except the memory of reservations that a process may still write to, which is kept until that has exited.
    """

    def __init__(
        self, cache: TieredCache, hello: Hello, numbers: Iterator[int], recorder: Recorder | None = None
    ) -> None:
        self.name = hello.engine
        self.layout = hello.layout
        self.startup_namespace = hello.namespace
        """Of the weights that it has started with. Identifies the engine's model to all of its ranks."""
        self.weights = Weights(hello.namespace, "")
        cache.layouts.add(hello.namespace, hello.layout)
        self.model: EngineModel | None = None
        self.staging: EngineStaging | None = None
        """``None`` until a worker has requested a staging buffer."""
        self._whole_payload = self.layout.payload_bytes(self.layout.chunk_tokens)
        self._whole_bytes = object_bytes(self._whole_payload)
        self._state_bytes = object_bytes(self.layout.payload_bytes(STATE_TOKENS))
        step = self.layout.granularity
        self._hashes_bytes = self.layout.chunk_tokens // step * BLOCK_HASH_BYTES if step else 0
        """Of the block hashes of a whole chunk."""
        self._lengths: list[int] = []
        """Of the last prompts, in tokens."""
        self._cache = cache
        self._numbers = numbers
        self._recorder = recorder
        self.reads = ReadLeases(numbers)
        self.writes = PendingWrites(cache, hello.layout.ranks)
        self._asked: dict[int, Asked] = {}
        """Requests whose outcome is awaited, by the ticket of their first lookup."""
        self.absent_ranks: set[int] = set()
        """Ranks that have left and not returned. They never fill what is reserved meanwhile."""

    @property
    def namespace(self) -> bytes:
        """The namespace of the weights that the engine has now."""
        return self.weights.namespace

    def use_weights(self, weights: Weights) -> None:
        """Look up and reserve chunks of other weights from now on."""
        self.weights = weights
        self._cache.layouts.add(weights.namespace, self.layout)
        if self.staging is not None:
            self.staging.namespace = weights.namespace

    def look_up(self, request: LookupRequest) -> tuple[Found, FoundPrefix]:
        """Return the immediate answer, and the lookup itself, of which parts may still be in flight."""
        keys = split_keys(request.keys)
        expected = self._expected(len(keys), request.tokens)
        asked = self._asked.get(request.renews)
        known = request.tokens if asked is None else asked.hit_tokens  # Without an outcome, nothing counts.
        if self._recorder is not None and not request.repeated:
            self._recorder.record(
                request.keys, request.tokens, self.layout.chunk_tokens, self._whole_bytes, request.hints
            )
        if not request.repeated:
            self._observe_length(request.tokens)
        query = Query(
            keys,
            request.tokens,
            hints=request.hints,
            block_tags=self._prompt_tags(request),
            compute_seconds=max(0.0, request.compute_seconds),
            expect_seconds=request.expect_seconds,
            expect_chunks=request.expect_chunks,
            repeated=request.repeated,
            counted=known if request.renews else None,
            canary=request.canary,
        )
        if request.canary:
            self._cache.uncover(keys, request.canary)
        if self.layout.has_states:
            found = self._cache.look_up_state(query, expected, self._state_bytes)
        else:
            found = self._cache.look_up(query, expected, staged=self._buffers)
        if request.described is not None and not request.repeated:
            asked = Asked(found.began_at)
            remember(self._asked, request.ticket, asked, MAX_ASKED)
        if asked is not None:
            asked.hit_tokens = max(asked.hit_tokens, found.hit_tokens)
        ticket = self.reads.begin(request.ticket)
        answer = self._grant(ticket, found, fetching=found.in_flight)
        if answer.fetching:
            ticket.pending = found
        return answer, found

    def findings(self) -> Iterator[Finding]:
        """Yield what keeps this engine's prompts from being hit."""
        model, shortest = self.model or EngineModel([]), self.layout.shortest_hit
        yield from model.findings
        if 0 < model.max_tokens <= shortest:
            yield Finding(
                f"engine {self.name}: hits have at least {shortest} tokens, and prompts at most "
                f"{model.max_tokens} (--max-model-len)",
                "lower chunk_tokens or --block-size",
            )
        memory, size = self._cache.memory, model.max_tokens // self.layout.chunk_tokens * self._whole_bytes
        if size > memory.arena.capacity:
            yield Finding(
                f"engine {self.name}: a prompt of {model.max_tokens} tokens takes {format_size(size)}, and "
                f"all of tier {memory.name} has {format_size(memory.arena.capacity)}",
                f"set the capacity of tier {memory.name} to {format_size(4 * size)} or more",
            )

    def _observe_length(self, tokens: int) -> None:
        """Note prompts that are shorter than a chunk. Takes a microsecond."""
        self._lengths.append(tokens)
        if len(self._lengths) < MIN_LENGTHS:
            return
        typical = sorted(self._lengths)[MIN_LENGTHS * 9 // 10]
        self._lengths.clear()
        chunk, unit = self.layout.chunk_tokens, self.layout.unit_tokens
        if typical < chunk > unit:
            self._cache.findings.note(
                f"short prompts {self.name}",
                f"engine {self.name}: 9 of 10 prompts are shorter than chunk_tokens ({chunk}), so what they "
                "have in common is stored once for each of them",
                f"chunk_tokens: {max(1, typical // 2 // unit) * unit}",
            )

    def _prompt_tags(self, request: LookupRequest) -> PromptTags | None:
        if not request.root or not self._hashes_bytes:
            return None
        if len(request.root) != KEY_BYTES:
            raise ProtocolError(f"a root key of {len(request.root)} bytes")
        return PromptTags(ChunkKey(request.root), request.marks, self._hashes_bytes // BLOCK_HASH_BYTES)

    @property
    def _buffers(self) -> Staging | None:
        return None if self.staging is None else self.staging.current

    def _expected(self, chunks: int, tokens: int) -> Expected:
        whole = self.layout.chunk_tokens
        last = tokens - (chunks - 1) * whole
        if chunks and not 0 < last <= whole:
            raise ProtocolError(f"{tokens} tokens do not fit {chunks} chunks of {whole}")
        lengths = [self._whole_bytes] * chunks
        if last != whole:
            lengths[-1:] = [object_bytes(self.layout.payload_bytes(last))] if chunks else []
        return Expected(self.namespace, lengths)

    def progress(self, number: int, found: FoundPrefix) -> Found | None:
        """Return what has arrived since the last answer of a lookup, or ``None`` if it was cancelled."""
        ticket = self.reads.find(number)
        return None if ticket is None else self._grant(ticket, found, fetching=found.in_flight)

    def fetched(self, number: int, found: FoundPrefix) -> Found | None:
        """Return the final answer of a lookup, or ``None`` if it was cancelled."""
        ticket = self.reads.find(number)
        if ticket is None:
            found.release()
            self.reads.forget(number)
            return None
        ticket.pending = None
        return self._grant(ticket, found, fetching=0)

    def give_up(self, number: int, found: FoundPrefix) -> None:
        """End the part of a lookup that is in flight: no connection is left to report its arrival to."""
        found.release()
        self.reads.end_pending(number, found)

    def _grant(self, ticket: Ticket, lookup: FoundPrefix, *, fetching: int) -> Found:
        """Grant leases on what is ready now."""
        staging = self._buffers
        staging_source = len(self._cache.tiers)
        buffer = 0 if staging is None else staging.number
        found = Found(ticket.number, [], [], [], fetching, buffer, lookup.held, needed=lookup.needed)
        ready = lookup.take_ready()
        if fetching:
            found = self._with_pending_sources(found, lookup)
        elif lookup.partial:
            found = self._with_block_hashes(found, ready)
        for chunks in ready:
            found.leases.extend(self.reads.grant(ticket, chunks))
            found.offsets.extend(chunks.leases.offsets)
            sources = chunks.sources
            found.sources.extend(sources if chunks.staged is None else repeat(staging_source, len(sources)))
        if not fetching:
            self.reads.forget_if_empty(ticket)
        return found

    def explain(self, request: LookupRequest, found: FoundPrefix, log: RequestLog) -> Explanation | None:
        """Return why chunks of a settled lookup are missing, if any; ``None`` if the engine has not asked."""
        described, first = request.described, request.renews or request.ticket
        asked = self._asked.get(first)
        if asked is None or described is None:
            return None
        misses = self._cache.explain(found, self.namespace, described.adapter, described.beginning)
        misses = [self._or_image(miss, described.images) for miss in misses]
        if (tags := found.query.block_tags) is not None and not request.repeated:
            log.breakers.passed(tags.root, found.query.keys)
            parted = next((miss for miss in misses if miss.reason is MissReason.DIVERGES), None)
            if parted is not None:
                self._note_parted(parted, tags.root, found.query, described.prompt, log.breakers)
        asked.hit_tokens = max(asked.hit_tokens, found.hit_tokens)
        asked.explanation = Explanation(first, found.whole * self.layout.chunk_tokens, misses)
        return asked.explanation

    def _note_parted(
        self, miss: Miss, root: ChunkKey, query: Query, prompt: bytes, breakers: Breakers
    ) -> None:
        """Count where a prompt parts from what is stored. ``prompt``: its tokens, or nothing."""
        at, before = miss.position, miss.position // self.layout.chunk_tokens
        parent = query.keys[before - 1] if before else root
        behind = query.tokens - at  # What is before the position may be a hit in part.
        seconds = query.compute_seconds * behind / query.tokens
        shows = prompt and self._cache.settings.why.show_text
        shown = around(self.namespace, array("I", prompt), at) if shows else None
        breakers.parted(parent, at, behind, seconds, again=miss.field == AGAIN, around=shown)

    def _or_image(self, miss: Miss, images: Sequence[tuple[int, int]]) -> Miss:
        """Return a miss, with the image as its reason if the prompt parts from what is stored within one."""
        stop = miss.position + self.layout.granularity
        if miss.reason is MissReason.DIVERGES and any(
            start < stop and miss.position < start + length for start, length in images
        ):
            return structs.replace(miss, reason=MissReason.OTHER_ADAPTER_OR_IMAGE, field="image")
        return miss

    def end(self, outcome: Outcome, log: RequestLog) -> None:
        """Report what became of a request."""
        now = time.monotonic()
        asked = self._asked.pop(outcome.ticket, None) or Asked(now)
        tokens = outcome.tokens, outcome.engine_tokens, outcome.hits, outcome.misses(asked.explanation)
        log.add(RequestReport(time.time(), outcome.request, self.name, *tokens, now - asked.began_at))

    def answer_ended(self, ended: AnswerEnded) -> None:
        """Report the end of an answer to policies, recording and estimate. Raises ProtocolError."""
        keys, seconds = split_keys(ended.prompt + ended.answer), min(ended.seconds, MAX_ENDED_SECONDS)
        self._cache.catalog.report_answer_ended(keys, ended.signature, seconds)
        if self._recorder is not None:
            self._recorder.answer_ended(ended.prompt, ended.signature, seconds)
        if self._cache.observe_answer_end is not None:
            *_, last = split_keys(ended.prompt)
            self._cache.observe_answer_end(AnswerEnd(time.monotonic() - seconds, last, ended.signature))

    def _with_block_hashes(self, found: Found, ready: Sequence[Ready]) -> Found:
        """Add the block hashes of the last chunk, which the engine may use in part; none if it is corrupt."""
        header = self._cache.arena.view(ready[-1].leases.offsets[-1], HEADER_BYTES)
        try:
            chunk = ChunkHeader.parse(header)
        except CorruptChunk:
            chunk = None
        if chunk is None or not self._fits(chunk):
            return structs.replace(found, last_tokens=self.layout.chunk_tokens)
        return structs.replace(
            found, block_hashes=chunk.block_hashes, parent=chunk.parent, last_tokens=chunk.tokens
        )

    def _fits(self, chunk: ChunkHeader) -> bool:
        """Return whether the number of tokens in a header, which may come from a peer, fits its payload."""
        layout = self.layout
        return (
            0 < chunk.tokens <= layout.chunk_tokens
            and layout.payload_bytes(chunk.tokens) == chunk.payload_bytes
        )

    def _with_pending_sources(self, found: Found, lookup: FoundPrefix) -> Found:
        """Add what is expected of the chunks in flight."""
        if lookup.partial is not None:
            tokens = self._likely_tokens(lookup.partial.blocks, lookup.chunks[-1].lease.length)
            found = structs.replace(found, last_tokens=tokens, likely_blocks=lookup.partial.equal)
        return structs.replace(found, pending_sources=lookup.pending_sources())

    def _likely_tokens(self, blocks: int, length: int) -> int:
        """Return a number of tokens for which a chunk has the same blocks, before its header has arrived.

        ``blocks``: its number of block hashes. ``length``: of the chunk object.
        """
        layout, step = self.layout, self.layout.granularity
        for whole in range(blocks * step, (blocks + 1) * step, layout.unit_tokens):
            # What is stored depends on the whole blocks, and on whether there are tokens after them.
            for tokens in (whole, whole + 1):
                if tokens <= layout.chunk_tokens and object_bytes(layout.payload_bytes(tokens)) == length:
                    return tokens
        return layout.chunk_tokens

    # Connections.

    def scheduler_joined(self, holding: Sequence[int], seen: int | None) -> None:
        """Process that a new scheduler has taken over, or the same one has reconnected.

        ``seen``: the last reservation that it was granted; ``None`` for another process.
        """
        self.reads.release_all(but=holding)
        self._asked.clear()
        if seen is not None:
            self.writes.abandon_after(seen)

    def reserve(self, request: Reserve, find: Callable[[int], Transfer | None] = lambda _: None) -> Reserved:
        """Reserve room for the chunks of many requests; lease 0 for those without room.

        ``find`` returns the KV transfer that a run names: its room is in the staging buffer. Raises
        :class:`ProtocolError`.
        """
        if sum(len(run.keys) for run in request.runs) > MAX_RESERVED_CHUNKS * KEY_BYTES:
            raise ProtocolError(f"a reservation of more than {MAX_RESERVED_CHUNKS} chunks")
        # Validate all runs before reserving anything.
        runs = [(run, self._headers(run)) for run in request.runs]
        # Those whose blocks may be lost first. What is offered again can wait.
        new = self._reserve_in_arena(runs, again=False)
        taken = sum(write.lease.length for write in new if write is not None)
        reserved = iter(new), iter(self._reserve_in_arena(runs, taken, again=True))
        if canaries := [key for run in request.runs if run.canary for key in split_keys(run.keys)]:
            self._cache.tasks.start_soon(self._cache.expire, canaries)
        staging = self._buffers
        writes: list[Reservation | None] = []
        for run, headers in runs:
            if run.kv_transfer:
                transfer = find(run.kv_transfer)
                writes += [_stage(staging, transfer, header) for header in headers]
            else:
                writes += islice(reserved[run.offered_again], len(headers))
        if not self.absent_ranks and any(run.recomputes is not None for run in request.runs):
            self._reserve_recomputed(runs, writes)
        extends = iter([run.extends for run in request.runs for _ in range(len(run.keys) // KEY_BYTES)])
        leases, offsets = [NO_LEASE] * len(writes), [0] * len(writes)
        for index, (write, chunk) in enumerate(zip(writes, extends, strict=True)):
            if write is not None:
                write.extends = chunk
                leases[index] = number = next(self._numbers)
                offsets[index] = write.lease.offset
                self.writes.add(number, write)
        number = 0 if staging is None else staging.number
        again, lacks_room = self._cache.wants_again, self._cache.lacks_room
        return Reserved(request.ticket, leases, offsets, number, again, lacks_room)

    def _reserve_in_arena(
        self, runs: Sequence[tuple[Run, list[ChunkHeader]]], taken: int = 0, *, again: bool
    ) -> list[Reservation | None]:
        """Return a reservation, or ``None``, for each new chunk, or for each that is offered ``again``.

        ``taken``: bytes of the engine's share that others of this request have.
        """
        runs = [pair for pair in runs if pair[0].offered_again == again and not pair[0].kv_transfer]
        in_arena = [header for _, headers in runs for header in headers]
        hints = [run.hints for run, headers in runs for _ in headers]
        # A state needs its chunks, and these are useless without it.
        declining = not self.layout.has_states and not any(run.awaited or run.canary for run, _ in runs)
        # A disconnected rank would never fill its slices.
        within = 0 if self.absent_ranks else self._within_share(in_arena, taken, again=again)
        reserved = self._cache.reserve_all(
            in_arena[:within], hints[:within], declining=declining, again=again
        )
        return reserved + [None] * (len(in_arena) - within)

    def _reserve_recomputed(
        self, runs: Sequence[tuple[Run, list[ChunkHeader]]], writes: list[Reservation | None]
    ) -> None:
        """Reserve room in ``writes`` to compare chunks that are held: all that there is, in random order."""
        chunks = [(run, at, header) for run, headers in runs for at, header in enumerate(headers)]
        for index in random.sample(range(len(chunks)), len(chunks)):
            run, at, header = chunks[index]
            if run.recomputes is not None and writes[index] is None:
                start = run.recomputes.start + at * self.layout.chunk_tokens
                of = structs.replace(run.recomputes, start=start)
                writes[index] = self._cache.verifying.reserve(header, of, measures=run.canary)

    def _within_share(self, headers: Sequence[ChunkHeader], taken: int, *, again: bool) -> int:
        """Return how many chunks, in order, may be reserved before this engine has more than its share."""
        cache = self._cache
        limit = max(
            int(cache.arena.capacity * cache.settings.reserve_share), self._whole_bytes, self._state_bytes
        )
        room = limit - self.writes.reserved_bytes - taken
        lengths = [object_bytes(header.payload_bytes) for header in headers]
        if sum(lengths) <= room:
            return len(headers)
        absent = set(cache.memory.absent([header.key for header in headers]))
        for at in sorted(absent):
            room -= lengths[at]
            if room < 0 and again:  # They may have been stored before: that counts as no loss.
                return at
            if room < 0:
                beyond = [headers[index].key for index in absent if index >= at]
                cache.note_dropped(beyond)
                message = (
                    "engine %s: %d chunks are not cached: at most %s may be reserved at once (reserve_share)"
                )
                cache.warn("reserve_share", message, self.name, len(beyond), format_size(limit))
                return at
        return len(headers)

    def reclaim(self) -> None:
        """Release what a stopped engine holds, except memory that it may write to when it is continued.

        Others may store its chunks. Its loads fail when it confirms them.
        """
        self.reads.release_all()
        self.writes.void_all()

    @property
    def idle(self) -> bool:
        """Whether it holds neither leases nor reservations that are not void."""
        return not len(self.reads) and self.writes.all_void

    def _headers(self, run: Run) -> list[ChunkHeader]:
        keys = split_keys(run.keys)
        fewest = STATE_TOKENS if self.layout.has_states else 1
        if len(run.parent) != KEY_BYTES or not fewest <= run.last_tokens <= self.layout.chunk_tokens:
            raise ProtocolError(
                f"invalid run: {len(keys)} chunks, {run.last_tokens} tokens in the last one, "
                f"parent key of {len(run.parent)} bytes"
            )
        parents = [ChunkKey(run.parent), *keys[:-1]]
        size = self._hashes_bytes
        if len(run.block_hashes) > size * len(keys):
            raise ProtocolError(f"invalid run: {len(run.block_hashes)} bytes of block hashes")
        hashes = [run.block_hashes[at * size : (at + 1) * size] for at in range(len(keys))]
        tokens, payloads = [self.layout.chunk_tokens] * len(keys), [self._whole_payload] * len(keys)
        if run.last_tokens != self.layout.chunk_tokens and keys:
            tokens[-1], payloads[-1] = run.last_tokens, self.layout.payload_bytes(run.last_tokens)
        return list(map(ChunkHeader, keys, parents, repeat(self.namespace), payloads, hashes, tokens))

    def commit(self, leases: Sequence[int], rank: int) -> None:
        """Record that a rank has filled its slices; chunks that all ranks have filled become READY.

        Staged chunks are reported to their transfer first, so that it pushes them from the staging buffer.
        """
        complete: list[Reservation] = []
        void: list[Reservation] = []
        for write in self.writes.finish(leases, rank):
            if write.void:
                void.append(write)
            elif write.complete():
                complete.append(write)
        self._cache.commit(complete)
        # Only now: until a chunk is READY, the ones that it supersedes are all that can be found.
        for write in complete:
            header = write.header
            if write.extends:
                self._cache.supersede_states(ChunkKey(write.extends))
            if header.block_hashes:
                whole = len(header.block_hashes) == self._hashes_bytes
                self._cache.supersede_tails(header.key, whole=whole)
        self.writes.discard(void)

    def close(self) -> None:
        """Release everything that no process may write to: the engine has disconnected."""
        self.reads.release_all()
        self.writes.close()
        self.absent_ranks.clear()
        self.reads.clear()

    def status(self) -> dict[str, object]:
        """Return what the engine holds."""
        return {
            "name": self.name,
            "weights_id": self.weights.id,
            "leases": len(self.reads),
            "reservations": len(self.writes),
            "tickets": self.reads.tickets,
        }


def _stage(staging: Staging | None, transfer: Transfer | None, header: ChunkHeader) -> Reservation | None:
    """Reserve room in the staging buffer if a chunk is to be pushed from there."""
    if staging is None or transfer is None:
        return None
    return transfer.staging.reserve(staging, header)
