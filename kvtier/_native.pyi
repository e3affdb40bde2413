"""kvtier's native core (csrc/). Imported by :mod:`kvtier.native` alone."""

def build_info() -> dict[str, str | bool]:
    """The compiler that made it, and what the processor and the build have: avx2, avx512, io_uring."""
