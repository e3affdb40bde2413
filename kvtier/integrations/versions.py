"""The versions of vLLM that the connector supports. Does not import vLLM."""

from __future__ import annotations

import re
from typing import Literal

OLDEST, NEWEST = (0, 30), (0, 33)
RANGE = "0.30 to 0.33"
REQUIREMENT = "vllm>=0.30,<0.34"


def support(version: str) -> Literal["supported", "newer", "unsupported"]:
    """Return whether the connector supports a version of vLLM.

    A newer minor version is not refused: each worker checks that it reads and writes the KV memory as vLLM
    does (``integrations/vllm/layout.py``).
    """
    numbers = re.match(r"(\d+)\.(\d+)(?:\.|$)", version)
    if numbers is None:
        return "unsupported"
    minor = int(numbers[1]), int(numbers[2])
    if minor < OLDEST or minor[0] != NEWEST[0]:
        return "unsupported"
    return "supported" if minor <= NEWEST else "newer"
