"""Fingerprints of weights in files: equal for copies of the same files in any folder.

Small files are hashed whole, so copies of any age are equal. Of large ones, a fingerprint covers the size,
the modification time, the header of a safetensors file, and samples of the tensors: :data:`MAX_SAMPLES` in
all, so that 100 GB take as long as 1 GB. Samples alone miss a change between them, such as trained
embeddings of a few tokens. The time alone misses files that were written with an earlier time.

Whether files are still those of a fingerprint is answered by their :class:`Signature`, without reading them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from blake3 import blake3

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

WHOLE_BYTES = 64 << 20
"""A model with no more bytes is hashed whole, in some 20 ms."""
SMALL_BYTES = 1 << 20
"""A file of at most this size is always hashed whole, for example a configuration."""
MAX_SAMPLES = 4096
"""Of all files together. More than the tensors of a dense model."""
MIN_SAMPLES = 4
"""Of each file."""
SAMPLE_BYTES = 4096
END_BYTES = 64 << 10
"""Read at both ends of a file of another format: an archive of torch ends with checksums of all tensors."""
MAX_HEADER_BYTES = 100 << 20
"""The limit of the safetensors format."""
MAX_FILES = 4096
"""A folder with more is not fingerprinted."""
THREADS, READS = 16, 64
"""Files, and ranges of all files, are read in parallel, for the latency of a network file system."""
READ_BYTES = 1 << 20
BATCH = 16
"""Ranges that one thread reads before it gets the next ones: a local disk needs no more threads."""

_LENGTH = struct.Struct("<Q")


class FileState(NamedTuple):
    """What changes whenever a file is written or replaced."""

    name: str
    size: int
    modified: int
    changed: int
    """In nanoseconds, as ``modified``. No program can set this one."""
    inode: int


Signature = tuple[FileState, ...]
"""The states of all files, by name. While it is the same, they have not changed."""


class _Tensor(msgspec.Struct):
    """An entry of a safetensors header: a tensor, or the metadata."""

    data_offsets: tuple[int, int] | None = None


_HEADER = msgspec.json.Decoder(dict[str, _Tensor])


def signature(path: Path, wanted: Callable[[str], bool]) -> Signature:
    """Return the states of the files of a folder, or of a single file, whose name is ``wanted``.

    Each is opened: only then does a network file system ask the server for its times. Symbolic links are
    followed. Folders within the folder are ignored. Raises ``OSError`` if any cannot be read, or none exists.
    """
    names = _names(path, wanted)
    if not names or len(names) > MAX_FILES:
        raise FileNotFoundError(f"{path} has {len(names)} files of a model")
    return tuple(_in_parallel(lambda name: _state(_located(path, name), name), names))


def fingerprint(path: Path, files: Signature, whole_bytes: int = WHOLE_BYTES) -> str:
    """Return the fingerprint of files. Blocks for up to 0.1 s, longer on a slow disk or network.

    ``whole_bytes``: up to how many bytes in all they are hashed whole. Raises ``OSError`` if a file cannot be
    read, or is not as in ``files`` afterwards.
    """
    sampled = sum(file.size for file in files) > whole_bytes
    budget = max(MIN_SAMPLES, MAX_SAMPLES // len(files)) if sampled else 0
    with ThreadPoolExecutor(READS, "kvtier-read") as reads:
        digests = _in_parallel(
            lambda file: _file_digest(_located(path, file.name), file, budget, reads), files
        )
    whole = blake3(derive_key_context="kvtier files v1")
    for file, digest in zip(files, digests, strict=True):
        modified = file.modified if _is_sampled(file, budget) else None
        whole.update(msgspec.msgpack.encode((file.name, file.size, modified, digest)))
    return whole.hexdigest()


def _names(path: Path, wanted: Callable[[str], bool]) -> list[str]:
    if not path.is_dir():
        return [path.name]
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if wanted(entry.name) and entry.is_file())


def _located(path: Path, name: str) -> Path:
    return path / name if path.name != name or path.is_dir() else path


def _in_parallel(function: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
    if len(items) <= MIN_SAMPLES:
        return [function(item) for item in items]
    with ThreadPoolExecutor(THREADS, "kvtier-files") as pool:
        return list(pool.map(function, items))


def _state(path: Path, name: str) -> FileState:
    with path.open("rb", buffering=0) as opened:
        return _state_of(opened.fileno(), name)


def _state_of(descriptor: int, name: str) -> FileState:
    found = os.fstat(descriptor)
    return FileState(name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


def _is_sampled(file: FileState, budget: int) -> bool:
    return budget > 0 and file.size > SMALL_BYTES


def _file_digest(path: Path, file: FileState, budget: int, reads: Executor) -> bytes:
    with path.open("rb", buffering=0) as opened:
        descriptor = opened.fileno()
        ranges = list(_pieces(_ranges(descriptor, file, budget)))
        batches = [ranges[at : at + BATCH] for at in range(0, len(ranges), BATCH)]
        parts = [reads.submit(_digest, descriptor, batch) for batch in batches]
        wait(parts)  # All, even if one fails: the descriptor is closed after them.
        digest = blake3(b"".join(part.result() for part in parts)).digest()
        if _state_of(descriptor, file.name) != file:
            raise OSError(f"{path} has changed while it was read")
        return digest


def _digest(descriptor: int, ranges: Sequence[tuple[int, int]]) -> bytes:
    digest = blake3()
    for offset, size in ranges:
        digest.update(os.pread(descriptor, size, offset))
    return digest.digest()


def _pieces(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Split ranges that are longer than one read."""
    for offset, size in ranges:
        for start in range(offset, offset + size, READ_BYTES):
            yield start, min(READ_BYTES, offset + size - start)


def _ranges(descriptor: int, file: FileState, budget: int) -> Iterator[tuple[int, int]]:
    """Yield which bytes of a file to hash: all, or its ends or header, and ``budget`` samples."""
    if not _is_sampled(file, budget):
        yield 0, file.size
        return
    # Without this, each sample reads the 128 KiB after it as well.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    header = _header_bytes(descriptor, file) if file.name.endswith(".safetensors") else 0
    tensors = _tensors(descriptor, header) if header else []
    if not tensors:
        yield 0, END_BYTES
        yield file.size - END_BYTES, END_BYTES
        yield from _samples(0, file.size, budget)
        return
    yield 0, header
    step = max(1.0, len(tensors) / budget)
    chosen = [tensors[int(at * step)] for at in range(int(len(tensors) / step))]
    for start, stop in chosen:
        yield from _samples(header + start, header + stop, budget // len(chosen))


def _samples(start: int, stop: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield evenly distributed samples of some bytes, or all of them if they are few."""
    if stop - start <= count * SAMPLE_BYTES:
        yield start, stop - start
        return
    stride = (stop - start) / count
    for at in range(count):
        yield int(start + (at + 0.5) * stride) - SAMPLE_BYTES // 2, SAMPLE_BYTES


def _header_bytes(descriptor: int, file: FileState) -> int:
    """Return where the tensors of a safetensors file begin; 0 if it is none."""
    (length,) = _LENGTH.unpack(os.pread(descriptor, _LENGTH.size, 0))
    return int(length) + _LENGTH.size if length <= min(MAX_HEADER_BYTES, file.size) else 0


def _tensors(descriptor: int, header: int) -> list[tuple[int, int]]:
    """Return where the tensors are, in the order of the file."""
    try:
        found = _HEADER.decode(os.pread(descriptor, header - _LENGTH.size, _LENGTH.size))
    except msgspec.DecodeError:
        return []
    return sorted(tensor.data_offsets for tensor in found.values() if tensor.data_offsets is not None)
