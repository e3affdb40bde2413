"""The namespaces of chunks by number, and the generation of each.

Clearing chunks begins a new generation of their namespace. Each chunk has the generation in which it was
stored or last cleared. A copy, read or query is outdated if the chunk's generation has changed since it
began.
"""

from __future__ import annotations

_BITS = (1 << 32) - 1


class Namespaces:
    """Numbers are dense, and never reused."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {b"": 0}
        self._generations = [0]
        self._common = 0
        """Number of generations that all namespaces have begun together."""
        self._reset: set[bytes] = set()
        self._all_reset = False

    def number(self, namespace: bytes) -> int:
        """Return the number of a namespace, which is added if it is new."""
        number = self._numbers.get(namespace)
        if number is None:
            number = self._numbers[namespace] = len(self._generations)
            self._generations.append(0)
        return number

    def known(self) -> list[bytes]:
        """Return all namespaces of chunks that are, or have been, in any tier."""
        return list(self._numbers)

    def find(self, namespace: bytes) -> int:
        """Return the number of a namespace, or -1 if it is unknown."""
        return self._numbers.get(namespace, -1)

    def generation(self, number: int) -> int:
        """Return the current generation of a namespace."""
        return self._generations[number] + self._common & _BITS

    def generation_of(self, namespace: bytes) -> int:
        """Return the current generation of a namespace, which may be unknown."""
        number = self._numbers.get(namespace)
        return self._common & _BITS if number is None else self.generation(number)

    def begin_generation(self, number: int) -> int:
        """Begin a new generation of a namespace, and return it."""
        self._generations[number] += 1
        return self.generation(number)

    def reset(self, namespace: bytes | None) -> None:
        """Record that a namespace, or every one, is cleared for good, because the weights have changed."""
        if namespace is None:
            self._common += 1
            self._all_reset = True
        else:
            self._reset.add(namespace)
            self.begin_generation(self.number(namespace))

    def is_reset(self, namespace: bytes) -> bool:
        """Whether chunks of a namespace that other hosts have stored must not be used."""
        return self._all_reset or namespace in self._reset
