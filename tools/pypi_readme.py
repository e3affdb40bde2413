"""The README for PyPI, as scikit-build-core asks for it: `[[tool.dynamic-metadata]]` in `pyproject.toml`.

Its links are relative, so that they work in a clone and in the documentation. PyPI needs absolute ones, to
the files of this version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

README = Path(__file__).parent.parent / "README.md"
_RELATIVE = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of the metadata. Called by the build backend."""
    base = f"{project['urls']['Source']}/blob/v{project['version']}"
    text = _RELATIVE.sub(rf"]({base}/\1)", README.read_text(encoding="utf-8"))
    return {"readme": {"content-type": "text/markdown", "text": text}}
