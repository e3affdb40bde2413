"""The conformance suite, faults specific to this medium, and that kvtier loads the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtier_template import TemplateBackend, TemplateSettings

from kvtier import TierError
from kvtier.backends.base import Backend, Outcome
from kvtier.memory.keys import ChunkKey
from kvtier.plugins import Plugins
from kvtier.testing.backend import BackendConformance, make_key


def make(path: Path) -> TemplateBackend:
    return TemplateBackend(TemplateSettings(name="shared", type="template", path=path))


class TestConformance(BackendConformance):
    persistent = True  # stored values survive close and open

    def make_backend(self, path: Path) -> Backend:
        return make(path / "chunks")

    def corrupt(self, path: Path, key: ChunkKey) -> bool:
        file = path / "chunks" / key.hex()
        value = bytearray(file.read_bytes())
        value[len(value) // 2] ^= 1
        file.write_bytes(value)
        return True


@pytest.mark.anyio
async def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chunks").write_text("not a folder")
    with pytest.raises(TierError, match=r"tier 'shared': path: .*chunks.*: set it to a folder"):
        await make(tmp_path / "chunks").open()


@pytest.mark.anyio
async def test_a_folder_replaced_by_a_file(tmp_path: Path) -> None:
    backend = make(tmp_path / "chunks")
    await backend.open()
    (tmp_path / "chunks").rmdir()
    (tmp_path / "chunks").write_text("not a folder")
    assert await backend.put([(make_key(1), memoryview(b"value"))]) == [Outcome.FAILED]
    assert await backend.get([(make_key(1), memoryview(bytearray(5)))]) == [Outcome.FAILED]
    with pytest.raises(NotADirectoryError):
        await backend.delete([make_key(1)])
    await backend.close()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_kvtier_finds_it() -> None:
    assert Plugins.load(["kvtier-template"]).backend("template") is TemplateBackend
