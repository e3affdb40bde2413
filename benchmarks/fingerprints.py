"""Measure what reading a model's identity adds to the start of an engine, and an adapter's to its load.

::

    python -m benchmarks.fingerprints --folder /var/tmp

The model has 100 GB in 50 sparse files, so its pages are never read from a disk. The adapter is real.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import tempfile
import time
from pathlib import Path

from benchmarks.common import parse, show
from kvtier.memory.fingerprint import fingerprint, signature

SHARDS, SHARD_BYTES, TENSORS = 50, 2 << 30, 16
ADAPTER_BYTES = 100 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure fingerprints of a model and an adapter.")
    parser.add_argument("--runs", type=int, default=7, help="default: %(default)s")
    parser.add_argument("--folder", type=Path, help="on a file system with sparse files; default: temporary")
    options = parse(parser, runs=1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model, adapter = Path(folder) / "model", Path(folder) / "adapter"
        model.mkdir()
        adapter.mkdir()
        for shard in range(SHARDS):
            _write_sparse(model / f"model-{shard:05}-of-{SHARDS:05}.safetensors")
        (adapter / "adapter_model.safetensors").write_bytes(os.urandom(ADAPTER_BYTES))
        rows = [
            _measure("model of 100 GB, 50 files, 800 tensors", model, options.runs),
            _measure("adapter of 100 MiB, hashed whole", adapter, options.runs, 256 << 20),
        ]
    show("identity of weights, ms", ("", "first", "median", "compare with an earlier state"), rows)


def _write_sparse(path: Path) -> None:
    size = SHARD_BYTES // TENSORS
    header = json.dumps(
        {
            f"layer.{at}": {"dtype": "U8", "shape": [size], "data_offsets": [at * size, (at + 1) * size]}
            for at in range(TENSORS)
        }
    ).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + SHARD_BYTES)


def _measure(name: str, folder: Path, runs: int, whole_bytes: int = 0) -> tuple[str, float, float, float]:
    states, reads = [], []
    for _ in range(runs):
        started = time.perf_counter()
        files = signature(folder, lambda _: True)
        states.append(time.perf_counter() - started)
        fingerprint(folder, files, whole_bytes)
        reads.append(time.perf_counter() - started)
    return name, reads[0] * 1e3, statistics.median(reads) * 1e3, statistics.median(states) * 1e3


if __name__ == "__main__":
    main()
