from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from soak import damage
from soak.damage import Damage
from soak.disks import Disk, small_disk

CONTENT = bytes(10_000)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """A disk with six chunks, each in its own folder."""
    made = Disk(tmp_path, None)
    for number in range(6):
        file = made.tier / f"{number:03}" / f"{number:064}.kv"
        file.parent.mkdir(parents=True)
        file.write_bytes(CONTENT)
    return made


def intact(disk: Disk) -> int:
    return sum(file.is_file() and file.read_bytes() == CONTENT for file in disk.files())


@pytest.mark.parametrize("kind", damage.CHANGES)
def test_damage_changes_the_given_number_of_files(disk: Disk, kind: str) -> None:
    assert Damage(disk, random.Random(1)).apply(kind, 3) == 3
    assert intact(disk) == 3
    assert Damage(disk, random.Random(1)).apply(kind, 10) == len(disk.files()) + 3 * (kind == "remove-files")


@pytest.mark.parametrize("seed", range(20))
def test_planted_files_take_the_place_of_chunks_until_they_are_removed(disk: Disk, seed: int) -> None:
    planted = Damage(disk, random.Random(seed))
    assert planted.apply("plant-files", 3) > 3
    assert intact(disk) == 3
    planted.undo()
    assert len(disk.files()) == intact(disk) == 3
    assert {path for path in disk.tier.rglob("*") if not path.is_dir()} == set(disk.files())


@pytest.mark.parametrize("seed", range(5))
def test_hidden_folders_cannot_be_listed_until_they_are_back(disk: Disk, seed: int) -> None:
    hidden = Damage(disk, random.Random(seed))
    assert hidden.apply("hide-folders", 4) == 4
    assert intact(disk) == 2
    unlisted = 0
    for folder in disk.tier.iterdir():
        try:
            list(folder.iterdir())
        except OSError:
            unlisted += 1
    assert unlisted == 4
    hidden.undo()
    assert intact(disk) == 6
    assert [path.name for path in disk.tier.parent.iterdir()] == [disk.tier.name]


def test_hidden_folder_that_was_made_again_is_not_put_back(disk: Disk) -> None:
    hidden = Damage(disk, random.Random(1))
    hidden.apply("hide-folders", 6)
    shutil.rmtree(disk.tier)
    hidden.undo()
    assert [*disk.tier.parent.iterdir()] == []


def test_removed_folder_is_empty_or_gone(disk: Disk) -> None:
    left = set()
    for seed in range(10):
        disk.tier.mkdir(exist_ok=True)
        (disk.tier / "a.kv").touch()
        assert Damage(disk, random.Random(seed)).apply("remove-folder") == 1
        assert disk.files() == []
        left.add(disk.tier.exists())
    assert left == {False, True}


def test_used_bytes_are_those_of_chunks(disk: Disk) -> None:
    (disk.tier / "000" / "a.kv").symlink_to("/dev/zero")
    (disk.tier / "000" / "b.kv").mkdir()
    (disk.tier / "000" / "c").write_bytes(CONTENT)
    assert disk.used() == 6 * len(CONTENT)


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
