"""A plugin for pytest that changes one module before it is imported: see test_mutations.py."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "KVTIER_TEST_MUTATION"
"""A JSON list: the module, the text to replace in its source, and its replacement."""


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, old: str, new: str) -> None:
        super().__init__(name, path)
        self._old, self._new = old, new

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        """Compile the changed source, never a cached one."""
        source = self.get_source(fullname)
        assert source is not None
        assert self._old in source, f"not in {fullname}: {self._old}"
        return compile(source.replace(self._old, self._new), self.path, "exec")


class _Finder:
    def __init__(self, name: str, old: str, new: str) -> None:
        self._name, self._old, self._new = name, old, new

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the changed module; None for others."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(name, found.origin, self._old, self._new)
        return importlib.util.spec_from_file_location(name, found.origin, loader=loader)


if VARIABLE in os.environ:
    sys.meta_path.insert(0, _Finder(*json.loads(os.environ[VARIABLE])))
