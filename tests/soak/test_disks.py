from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from soak.disks import Disk, small_disk

CONTENT = bytes(10_000)


@pytest.mark.parametrize("kind", ["flip-bits", "truncate-files", "garble-files", "remove-files"])
def test_damage_changes_the_given_number_of_files(tmp_path: Path, kind: str) -> None:
    disk = Disk(tmp_path, None)
    disk.tier.mkdir()
    for number in range(4):
        (disk.tier / f"{number}.kv").write_bytes(CONTENT)
    assert disk.damage(kind, 3, random.Random(1)) == 3
    damaged = 4 - sum(file.read_bytes() == CONTENT for file in disk.files())
    assert damaged == 3
    assert disk.damage(kind, 10, random.Random(1)) == len(disk.files()) + (kind == "remove-files")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_fill_and_empty_a_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, 16) as disk:
        if disk.medium is None:
            pytest.skip("cannot mount a file system here")
        disk.tier.mkdir()
        disk.fill()
        with pytest.raises(OSError, match="No space"):
            (disk.tier / "chunk").write_bytes(bytes(1 << 20))
        disk.empty()
        (disk.tier / "chunk").write_bytes(bytes(1 << 20))
    assert not disk.tier.exists()
    assert not (tmp_path / "disk.image").exists()
