"""The adapter of an engine, whose files are replaced in place, as when it is trained again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VERSIONS = 3
"""Number of versions, which alternate: chunks of a version are hits again when it is used again."""
ENGINE: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 1, "max_cpu_loras": 1}
"""Arguments of every engine. Without an adapter, its answers are those of an engine without these."""


def make_versions(folder: Path) -> list[Path]:
    """Create all versions, in a separate process, because it imports large libraries."""
    versions = [folder / f"version-{number}" for number in range(VERSIONS)]
    code = (
        "import sys, pathlib; from tests.rigs.vllm import models\n"
        "for seed, folder in enumerate(sys.argv[1:]): models.make_lora(pathlib.Path(folder), seed=seed)"
    )
    subprocess.run([sys.executable, "-c", code, *map(str, versions)], check=True, capture_output=True)
    return versions


def request(folder: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's ``LoRARequest``: the same ones for all versions in a folder."""
    return {"lora_name": "adapter", "lora_int_id": 1, "lora_path": str(folder)}


class Adapter:
    """One folder, which contains one version at a time."""

    def __init__(self, folder: Path, versions: Sequence[Path]) -> None:
        self._versions = versions
        self._folder = folder
        folder.mkdir(parents=True)
        self.version = 0
        self._copy()

    @property
    def request(self) -> dict[str, Any]:
        """The arguments of vLLM's ``LoRARequest``."""
        return request(self._folder)

    def replace(self) -> None:
        """Replace the files by those of the next version."""
        self.version = (self.version + 1) % len(self._versions)
        self._copy()

    def _copy(self) -> None:
        for file in self._versions[self.version].iterdir():
            copied = self._folder / f".{file.name}"
            shutil.copyfile(file, copied)
            copied.replace(self._folder / file.name)
