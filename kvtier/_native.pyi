"""kvtier's native core (csrc/). Imported by :mod:`kvtier.native` alone."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

def build_info() -> dict[str, str | int]:
    """Return the compiler, the available features (avx2, avx512, io_uring) and ``abi``.

    ``abi``: see :data:`kvtier.native.ABI`.
    """

def blake3(data: bytes) -> bytes:
    """Return the BLAKE3 hash, 32 bytes. For tests. Keeps the GIL."""

def block_hashes(tokens: object, block_tokens: int, hash_bytes: int) -> bytes:
    """Return the joined hashes of all whole blocks: see :func:`kvtier.memory.keys.block_hashes`.

    Only the first ``hash_bytes`` bytes of each. Keeps the GIL like :func:`chunk_keys`, and raises the same.
    """

def chunk_keys(
    parent: bytes, tokens: object, chunk_tokens: int, tail: bool, extras: list[bytes]
) -> list[bytes]:
    """Return the keys of consecutive chunks, in prefix order: see :func:`kvtier.memory.keys.chunk_keys`.

    ``parent``: the key of the chunk before the first one. ``tokens``: a sequence or array of integers, or
    ``bytes`` of little-endian u32. ``extras``: what each chunk depends on besides its tokens; chunks beyond
    its end depend on nothing else. Keeps the GIL for prompts of up to 131,072 tokens (0.7 ms), and releases
    it for longer ones.

    Raises: ``OverflowError``: a token is not a u32. ``TypeError``: a token is not an integer. ``ValueError``:
    the bytes are not whole words, the parent key is not 32 bytes long, or ``chunk_tokens`` is 0.
    """

def encode_tokens(tokens: object, start: int, stop: int) -> bytes:
    """Encode the tokens in ``[start, stop)``: see :func:`kvtier.memory.keys.encode_tokens`. Keeps the GIL."""

def exchange(
    socket: int,
    operations: Sequence[tuple[int, Sequence[bytes | memoryview]]],
    unread: bytearray,
    seconds: float,
    hashes: Hashes | None = None,
) -> tuple[int, int, int]:
    """Execute the operations over a connected, blocking socket.

    They are a conversation of :mod:`kvtier.concurrency.sockets.connection`. ``hashes`` get what is moved.

    Returns the number of completed operations, the bytes transferred of the next one, and an error number, or
    0: ``ETIMEDOUT`` after ``seconds``, ``ESHUTDOWN`` if the other side has closed the connection. Unexpected
    data is stored in ``unread``, which must be as long as the longest expected buffer. Blocks without the
    GIL, and keeps the buffers alive meanwhile.

    Raises: ``ValueError``: unknown operation. ``BufferError``: a buffer to be filled is read-only.
    """

class DiskEngine:
    """Transfers batches of objects between memory and files, with one io_uring and one native thread.

    Call its methods from one thread; except :meth:`close`, they do not wait for the disk. The memory of a
    batch is referenced until :meth:`finished` has returned its results.
    """

    def __init__(self, depth: int) -> None:
        """Transfer at most ``depth`` files concurrently. Raises ``OSError`` if io_uring is unavailable."""

    @property
    def event_fd(self) -> int:
        """An eventfd that is readable from the end of a batch until :meth:`finished` is called."""

    def register_memory(self, memory: memoryview) -> None:
        """Register memory with io_uring, part by part as it is used, as far as RLIMIT_MEMLOCK permits.

        Call at most once. The memory must stay mapped while the engine lives.
        """

    def read(self, items: list[tuple[bytes, memoryview]], direct: bool) -> int:
        """Fill each view with the file of that path; return the batch number.

        ``direct``: use O_DIRECT for aligned views.
        """

    def write(self, items: list[tuple[bytes, bytes, memoryview]], direct: bool) -> int:
        """Write each view to the second path, then rename it to the first; return the batch number."""

    def cancel(self, batch: int) -> None:
        """Drop transfers of a batch that have not started. They finish with ECANCELED."""

    def finished(self) -> list[tuple[int, list[int]]]:
        """Return the batches that have finished: number, and for each file 0, -1 (miss) or an errno."""

    def close(self) -> None:
        """Close the engine. Blocks, without the GIL, until every batch has finished."""

class KvMemory:
    """The addresses of an engine's KV pages in host memory, for copies of many pages per call.

    ``groups``: for each group of layers that share block tables, for each of its regions, address, page size
    in bytes, number of pages and their distance in bytes. The memory must outlive this object. ``skipped``:
    the null block, whose pages are not copied.
    """

    def __init__(self, groups: list[list[tuple[int, int, int, int]]], skipped: int) -> None: ...
    def load(
        self, arena: memoryview, chunks: list[tuple[int, Sequence[Sequence[int]]]], threads: int = 0
    ) -> None:
        """Copy the pages of chunks from the arena into the engine's memory.

        ``chunks``: for each chunk its offset in the arena, and the blocks of each group. ``threads``: the
        maximum number of threads; 0 chooses one for this machine. Blocks without the GIL. Raises
        ``IndexError``, before copying anything, if a block or a chunk is out of bounds.
        """

    def save(
        self, arena: memoryview, chunks: list[tuple[int, Sequence[Sequence[int]]]], threads: int = 0
    ) -> None:
        """Copy the pages of chunks from the engine's memory into the arena. Otherwise like :meth:`load`."""

def copy_buffers(pairs: Sequence[tuple[memoryview, bytes | memoryview]], threads: int = 0) -> None:
    """Copy the second buffer of each pair into the first.

    ``threads``: the maximum number of threads; 0 chooses one for this machine. Blocks without the GIL. Raises
    ``ValueError`` if the lengths of a pair differ.
    """

def write_hashed(descriptor: int, chunk: memoryview, start: int, length: int) -> bytes:
    """Write a chunk to a file; return the XXH3-128 of ``length`` bytes of it.

    Blocks without the GIL. Raises ``OSError`` if a write fails, and ``ValueError`` as :func:`xxh3_128`.
    """

def lossless_bound(length: int) -> int:
    """Return how many bytes encoding ``length`` bytes may need."""

def lossless_encode(source: bytes | memoryview, target: memoryview, dense: bool = False) -> int:
    """Encode the values of tensors; see :class:`kvtier.tiers.lossless.LosslessCodec`. Return the length.

    ``target`` has :func:`lossless_bound` bytes, or it raises ``ValueError``. ``dense``: in fewer bytes, which
    takes longer, as :class:`kvtier.tiers.lossless.DenseCodec` does. Blocks without the GIL.
    """

def lossless_decode(source: bytes | memoryview, target: memoryview) -> None:
    """Decode what :func:`lossless_encode` has written from as many bytes as ``target`` has.

    Anything else raises ``ValueError``; nothing is written elsewhere. Blocks without the GIL.
    """

def lossy_bound(table: bytes, length: int) -> int:
    """Return how many bytes :func:`lossy_encode` may need for what ``table`` describes.

    Raises ``ValueError`` unless that is ``length`` bytes in shapes that it can encode.
    """

def lossy_encode(form: int, table: bytes, source: bytes | memoryview, target: memoryview) -> int:
    """Encode the values of tensors; see :class:`kvtier.tiers.lossy.LossyCodec`. Return the length.

    ``form``: the code of the codec. ``target`` has :func:`lossy_bound` bytes, or it raises ``ValueError``.
    Blocks without the GIL.
    """

def lossy_decode(source: bytes | memoryview, target: memoryview) -> None:
    """Decode what :func:`lossy_encode` has written. Like :func:`lossless_decode`."""

def xxh3_128(data: bytes | memoryview) -> bytes:
    """Return the XXH3-128 hash, as ``xxhash.xxh3_128_digest`` does. Blocks without the GIL.

    Raises ``ValueError`` for fewer than 241 bytes.
    """

class ChunkTable:
    """See :class:`kvtier.catalog.table.PythonTable`. Keeps the GIL.

    The columns are locked during each call only. ``lengths`` and ``children``: by tier. All methods raise
    ``IndexError`` if a row or a tier is out of bounds, and :meth:`fill` ``ValueError`` if a key does not have
    32 bytes. Others never find such a key.
    """

    parents_only: int

    def __init__(
        self,
        keys: bytearray,
        parents: array[int],
        ready: bytearray,
        pending: bytearray,
        spaces: array[int],
        generations: array[int],
        shared_lengths: array[int],
        lengths: Sequence[array[int]],
        children: Sequence[array[int]],
    ) -> None: ...
    def find(self, key: bytes) -> int: ...
    def find_all(self, keys: Sequence[bytes]) -> list[int]: ...
    def prefix(self, keys: Sequence[bytes], among: int) -> tuple[list[int], bytes]: ...
    def absent(self, keys: Sequence[bytes], tier: int) -> list[int]: ...
    def fill(
        self,
        keys: Sequence[bytes],
        rows: Sequence[int],
        lengths: Sequence[int],
        parent: int,
        space: int,
        generation: int,
    ) -> None: ...
    def enter(self, rows: Sequence[int], tier: int, ready: bool) -> int: ...
    def leave(self, keys: Sequence[bytes], tier: int) -> tuple[list[int], int]: ...
    def release(self, rows: Sequence[int], tier: int) -> list[int]: ...
    def free_parents(self, rows: Sequence[int]) -> list[int]: ...

class LruOrder:
    """The rows of a ring, from the coldest. Raises ``IndexError`` if a link is out of bounds.

    Like a generator, it reads the next link when the next row is asked for. ``select_victims`` steps through
    it without Python.
    """

    def __init__(self, warmer: array[int]) -> None: ...
    def __iter__(self) -> Iterator[int]: ...
    def __next__(self) -> int: ...

def keys_at(column: bytearray, rows: Iterable[int]) -> list[bytes]:
    """Return the keys in these rows of a column of keys. Raises ``IndexError`` if a row is out of bounds."""

def split_keys(joined: bytes) -> list[bytes]:
    """Split joined keys. Raises ``ValueError`` if the length is no multiple of a key's."""

def select_victims(
    order: Iterator[int],
    parents: array[int],
    lengths: array[int],
    children: array[int],
    ready: bytearray,
    mask: int,
    is_pinned: Callable[[int], bool] | None,
    is_leased: Callable[[int], bool] | None,
    needed_bytes: int,
    limit: int,
    deferred: int,
    whole: bool,
) -> list[int]:
    """Choose victims in an order: see :func:`kvtier.catalog.selection.select_victims`.

    ``limit`` and ``deferred``: how many chunks to examine and to pass by at most; negative for no limit.
    ``whole``: the order has all chunks of the tier, so that one leaves even if all wait for others. The
    columns cannot be resized meanwhile. Raises ``IndexError`` if ``order`` yields what is not a row, and what
    ``order`` and the two functions raise.
    """

def lru_touch(warmer: array[int], colder: array[int], rows: Sequence[int]) -> None:
    """Move the rows of a prefix to the warm end of a ring: see ``LruPolicy.used``.

    ``warmer`` and ``colder`` are the links of the ring, arrays of C ints of equal length. Keeps the GIL, for
    about 2 µs per 128 rows. Raises, like the next two functions, ``ValueError`` for other arrays, and
    ``IndexError`` if a link is out of bounds.
    """

def lru_link_chain(warmer: array[int], colder: array[int], rows: Sequence[int], parent: int) -> None:
    """Link new rows, each just colder than the one before it, and the first just colder than ``parent``.

    If ``parent`` is -1 or not linked, the first becomes the warmest.
    """

def lru_unlink(warmer: array[int], colder: array[int], rows: Sequence[int]) -> None:
    """Unlink rows. Rows that are not linked are skipped."""

def rings_use(
    warmer: array[int],
    colder: array[int],
    ring_of: bytearray,
    counts: array[int],
    rows: Sequence[int],
    ring: int,
) -> None:
    """Make the rows of a prefix the warmest of a ring: see ``Rings.use``. Keeps the GIL, 3 µs per 128 rows.

    Raises ``ValueError`` for columns that do not fit together, and ``IndexError`` if a link or ring is out of
    bounds.
    """

def visits_runs(of_row: array[int], parents: array[int], rows: Sequence[int]) -> list[list[int]]:
    """Return the consecutive rows that visits have: see ``Visits.runs``."""

def visits_take(of_row: array[int], counts: array[int], visit: int, rows: Sequence[int]) -> list[int]:
    """Give rows to another visit, and return the visits that have none left: see ``Visits.take``.

    Raises ``IndexError`` if a row has no visit.
    """

def visits_move_on(
    newer: array[int],
    older: array[int],
    rings: array[int],
    sizes: array[int],
    since: array[float],
    ring: int,
    at: int,
    starts: array[float],
    now: float,
    most: int,
) -> list[int]:
    """Move visits that are too old for a ring: see ``Visits.move_on``.

    Raises ``ValueError`` for columns that do not fit together, and ``IndexError`` if a link or ring is out of
    bounds.
    """

def share_slices(
    places: array[int], handles: array[int], offsets: array[int], rows: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Add a handle to the slice of each leading row. Return the slices' numbers and offsets.

    See :meth:`kvtier.memory.slices.Leases.sharing`. Raises ``IndexError``, and changes nothing, if a slice
    has no handle or does not exist.
    """

def release_slices(handles: array[int], numbers: Sequence[int]) -> list[int]:
    """Take a handle from each slice. Return those without any other.

    Raises ``IndexError``, and changes nothing, if one has no handle or does not exist.
    """

def sampled_rows(keys: bytearray, rows: Sequence[int], threshold: int) -> list[int]:
    """Return the rows whose keys are in a sample: see :func:`kvtier.catalog.sampling.sampled_rows`.

    Raises ``IndexError`` if a row is out of bounds.
    """

def exchange_now(
    socket: int,
    operations: Sequence[tuple[int, Sequence[bytes | memoryview]]],
    unread: bytearray,
    hashes: Hashes | None = None,
) -> tuple[int, int, int]:
    """Like :func:`exchange`, without waiting: ``EAGAIN`` if the socket is not ready. Keeps the GIL."""

class Hashes:
    """Hashes payloads while :func:`exchange` moves them: twice as fast as later. Not thread-safe."""

    def __init__(self) -> None: ...
    def add(self, memory: memoryview, is_object: bool) -> None:
        """Hash what is moved of a payload, or of the payload in a chunk object. Does not keep it alive."""

    def move(self, memory: memoryview) -> None:
        """Hash bytes that have arrived by other means than :func:`exchange`."""

    def digests(self) -> list[bytes | None]:
        """Return the XXH3-128 of each payload; ``None`` if not all of it has moved, in order.

        For an object any bytes if its payload has the checksum that is in its header, else ``None``.
        """

class Pump:
    """Runs :func:`exchange` in at most ``max_threads`` native threads.

    Used by :class:`kvtier.concurrency.sockets.executor.IoExecutor`.
    """

    def __init__(self, max_threads: int) -> None:
        """Raises ``RuntimeError`` if no file descriptor is available."""

    def fileno(self) -> int:
        """Return an eventfd, which is readable while results can be collected."""

    def start(
        self,
        socket: int,
        operations: Sequence[tuple[int, Sequence[bytes | memoryview]]],
        unread: bytearray,
        seconds: float,
        hashes: Hashes | None = None,
    ) -> int:
        """Start :func:`exchange` and return its ticket. Does not block.

        The buffers are referenced until the result is collected.
        """

    def collect(self) -> list[tuple[int, int, int, int]]:
        """Return the finished exchanges: ticket, and the result of :func:`exchange`."""

    def close(self) -> None:
        """Wait for all exchanges. Blocks without the GIL. Idempotent."""

def number_chunks(
    ids: array[int], ends: array[int], max_vacant: int, numbered: array[int]
) -> tuple[int, int, int]:
    """Number the chunks of requests: see :func:`kvtier.lab.simulation.trace.number_chunks`.

    Fills ``numbered``, which is as long as ``ids``. Returns how many of it are used, a number that all are
    below, and how many differ. Blocks without the GIL. Raises ``ValueError`` if the columns do not fit
    together.
    """

def next_uses(
    chunks: array[int], ends: array[int], order: Sequence[int], numbers: int, uses: array[int]
) -> None:
    """Fill ``uses``: see :func:`kvtier.lab.simulation.belady.next_uses`. Blocks without the GIL.

    Raises, like the next function, ``IndexError`` for a chunk, request or use that there is not.
    """

def belady_hits(
    uses: array[int],
    ends: array[int],
    order: Sequence[int],
    capacity: int,
    interval: int,
    advance: Callable[[int], None] | None,
) -> int:
    """Return the hits of the optimum: see :func:`kvtier.lab.simulation.belady.belady_hits`. Keeps the GIL.

    ``advance`` is called after every ``interval`` requests, never if that is 0. Raises what it raises.
    """

class KeyNumbers:
    """See :class:`kvtier.fleet.controller.holders.PythonTable`. Keeps the GIL, for 65 to 150 ns per key.

    ``keys``: joined, or a sequence of keys. All methods raise ``ValueError`` if one does not have 32 bytes,
    and :meth:`change` what ``after`` raises; the keys before are changed then. :meth:`sweep` raises
    ``IndexError`` for a row beyond ``rows``.
    """

    rows: int

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def numbers(self, keys: bytes | Sequence[bytes]) -> list[int]: ...
    def runs(self, keys: bytes | Sequence[bytes]) -> list[tuple[int, int]]: ...
    def change(
        self, keys: bytes | Sequence[bytes], after: Callable[[int], int], max_keys: int
    ) -> tuple[list[tuple[int, int, int]], int]: ...
    def sweep(self, row: int, targets: array[int]) -> list[tuple[int, int, int]]: ...
