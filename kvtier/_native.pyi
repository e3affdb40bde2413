"""kvtier's native core (csrc/). Imported by :mod:`kvtier.native` alone."""

from array import array
from collections.abc import Sequence

def build_info() -> dict[str, str | int]:
    """The compiler that made it, and what the processor and the build have: avx2, avx512, io_uring.

    And ``abi``: see :data:`kvtier.native.ABI`.
    """

def blake3(data: bytes) -> bytes:
    """The BLAKE3 hash of some bytes, 32 bytes long; for tests. Keeps the GIL."""

def chunk_keys(
    parent: bytes, tokens: object, chunk_tokens: int, tail: bool, extras: list[bytes]
) -> list[bytes]:
    """The keys of consecutive chunks, in prefix order: see :func:`kvtier.memory.keys.chunk_keys`.

    ``parent`` is the key before the first. ``tokens`` are a sequence or an array of integers, or ``bytes``
    that are little-endian u32 already. ``extras`` are what each chunk depends on besides its tokens; chunks
    beyond its end depend on nothing else. Keeps the GIL for prompts of up to 131,072 tokens (0.7 ms), and
    releases it while it hashes longer ones. Raises ``OverflowError`` for what is no u32, ``TypeError`` for
    what is no integer, and ``ValueError`` for half a word, a key of another length than 32 bytes, or chunks
    of no token.
    """

def exchange(
    socket: int,
    operations: Sequence[tuple[int, Sequence[bytes | memoryview]]],
    unread: bytearray,
    seconds: float,
) -> tuple[int, int, int]:
    """Carry a conversation out over a connected, blocking socket: see :mod:`kvtier.sockets.conversation`.

    How many operations were carried out whole, how many bytes of the next one, and an error number, or 0:
    ``ETIMEDOUT`` after so many seconds, ``ESHUTDOWN`` where the other side has closed. What came and was not
    expected lies in ``unread``, which must be as long as the longest that is expected. Blocks without the
    GIL, for as long as the buffers are held. Raises ``ValueError`` for an operation that there is not,
    ``BufferError`` for a buffer that cannot be written.
    """

class DiskEngine:
    """Carries batches of objects between memory and files, through one io_uring and one native thread.

    Its methods are called from one thread and never wait for a disk, but for :meth:`close`. The memory of a
    batch is held until :meth:`finished` has told of it.
    """

    def __init__(self, depth: int) -> None:
        """At most ``depth`` files are read or written at once.

        Raises ``OSError`` where there is no io_uring.
        """

    @property
    def event_fd(self) -> int:
        """An eventfd that is readable once a batch has finished, until :meth:`finished` is called."""

    def keep(self, memory: memoryview) -> None:
        """Have the kernel pin this memory once, part by part as it is used, where it may.

        Called once at most. It cannot be unmapped as long as the engine lives.
        """

    def read(self, items: list[tuple[bytes, memoryview]], direct: bool) -> int:
        """Fill each memory with the file of that path; the batch's number.

        ``direct``: where it is aligned.
        """

    def write(self, items: list[tuple[bytes, bytes, memoryview]], direct: bool) -> int:
        """Write each memory to the second path, then give it the first as name; the batch's number."""

    def cancel(self, batch: int) -> None:
        """Drop what of a batch nobody has begun. It finishes like any other, those dropped with ECANCELED."""

    def finished(self) -> list[tuple[int, list[int]]]:
        """Each batch that has finished since, and of each of its files 0, -1 for a miss, or an ``errno``."""

    def close(self) -> None:
        """End it. Blocks until every batch has finished; releases the GIL meanwhile."""

class KvMemory:
    """Where the pages of an engine's KV memory lie, to copy many of them at once.

    ``groups`` has for each group of layers that share block tables, for each of its regions, an address, the
    bytes of a page and the number of pages: memory that must outlive this. ``skipped`` is the block that is
    nobody's: pages of it are not copied.
    """

    def __init__(self, groups: list[list[tuple[int, int, int]]], skipped: int) -> None: ...
    def load(
        self, arena: memoryview, chunks: list[tuple[int, Sequence[Sequence[int]]]], threads: int = 0
    ) -> None:
        """Copy the chunks' pages from the arena into the engine's memory.

        ``chunks`` are where a chunk begins in the arena, and the blocks of each group. On at most ``threads``
        threads, or 0: as many as the machine has use for. Blocks without the GIL. Raises ``IndexError``,
        before it copies anything, where a block or a chunk lies outside its memory.
        """

    def save(
        self, arena: memoryview, chunks: list[tuple[int, Sequence[Sequence[int]]]], threads: int = 0
    ) -> None:
        """Copy the chunks' pages from the engine's memory into the arena. Else like :meth:`load`."""

def copy_buffers(pairs: Sequence[tuple[memoryview, bytes | memoryview]], threads: int = 0) -> None:
    """Copy the second of each pair over the first, on at most ``threads`` threads, or as many as are of use.

    Blocks without the GIL. Raises ``ValueError`` where two differ in length.
    """

def xxh3_128(data: bytes | memoryview) -> bytes:
    """The XXH3-128 of some bytes, as ``xxhash.xxh3_128_digest`` has it. Blocks without the GIL.

    Raises ``ValueError`` for fewer than 241 bytes.
    """

def lru_touch(warmer: array[int], colder: array[int], rows: Sequence[int]) -> None:
    """Make a prefix the warmest of a ring: see :meth:`kvtier.catalog.lru.LruPolicy.used`.

    ``warmer`` and ``colder`` are the ring's arrays of C ints, equally long. Keeps the GIL: some 2 µs for 128
    rows. Raises ``ValueError`` for other arrays and ``IndexError`` for a ring that leads out of them, as do
    the next two.
    """

def lru_link_chain(warmer: array[int], colder: array[int], rows: Sequence[int], parent: int) -> None:
    """Link rows that are not linked yet, each just colder than the one before it, the first than ``parent``.

    Where that is -1 or not linked, the first becomes the warmest.
    """

def lru_unlink(warmer: array[int], colder: array[int], rows: Sequence[int]) -> None:
    """Unlink rows; those that are not linked are passed over."""

def exchange_now(
    socket: int, operations: Sequence[tuple[int, Sequence[bytes | memoryview]]], unread: bytearray
) -> tuple[int, int, int]:
    """As :func:`exchange`, without waiting: ``EAGAIN`` where the socket takes or gives nothing.

    Keeps the GIL.
    """

class Pump:
    """Conversations in native threads, ``most`` at once: see :mod:`kvtier.sockets.pump`."""

    def __init__(self, most: int) -> None:
        """Raises ``RuntimeError`` where there is no descriptor left."""

    def fileno(self) -> int:
        """An eventfd, which is readable while there is something to collect."""

    def start(
        self,
        socket: int,
        operations: Sequence[tuple[int, Sequence[bytes | memoryview]]],
        unread: bytearray,
        seconds: float,
    ) -> int:
        """Have :func:`exchange` done; a ticket.

        The buffers are held until it is collected. Does not block.
        """

    def collect(self) -> list[tuple[int, int, int, int]]:
        """Of each conversation that has ended: its ticket, and what :func:`exchange` returns."""

    def close(self) -> None:
        """Wait until all is over. Blocks without the GIL; harmless when repeated."""
