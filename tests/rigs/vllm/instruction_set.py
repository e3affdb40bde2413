"""Let ``ATEN_CPU_CAPABILITY`` limit vLLM as well as torch.

torch chooses its own kernels by that variable. vLLM chooses its compiled module, data types and block sizes
by what torch reports of the processor, which does not depend on the variable.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

ABOVE = {"avx2": ("avx512", "amx"), "avx512": ("avx512_bf16", "amx")}
"""Prefixes of what a processor has beyond a limit."""


def has(feature: str) -> bool:
    """Whether the processor has a feature, by torch's name of it, and the limit allows it."""
    above = ABOVE.get(os.environ.get("ATEN_CPU_CAPABILITY", ""), ())
    return bool(torch.cpu.get_capabilities().get(feature)) and not feature.startswith(above)


def limit() -> None:
    """Report less than the processor has, in this process and those that it forks."""
    name = os.environ.get("ATEN_CPU_CAPABILITY", "")
    above = ABOVE.get(name)
    if above is None:
        return
    # torch 2.13 runs what it has compiled for another limit, which computes wrong indices.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
        Path(tempfile.gettempdir()) / f"torchinductor-{os.getuid()}-{name}"
    )
    found = torch.cpu.get_capabilities()
    limited = {name: False if name.startswith(above) else value for name, value in found.items()}
    torch.cpu.get_capabilities = lambda: limited
