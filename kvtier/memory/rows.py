"""The KV of tokens as programs pass it. Neither numpy nor torch need be installed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from kvtier.errors import LayoutError

if TYPE_CHECKING:
    from typing_extensions import Buffer


@runtime_checkable
class HostTensor(Protocol):
    """The part of the tensor interface needed to access its bytes without importing torch."""

    @property
    def nbytes(self) -> int:
        """Size of all elements in bytes."""
        ...

    def data_ptr(self) -> int:
        """Address of the first element."""
        ...

    def is_contiguous(self) -> bool:
        """Whether the elements are contiguous in C order."""
        ...


@runtime_checkable
class HostArray(Protocol):
    """An array of numpy. Before Python 3.12, type checkers do not know that it is a buffer."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


Rows: TypeAlias = "Buffer | HostArray | HostTensor"
"""KV of consecutive tokens: a C-contiguous buffer, such as an array of numpy, or a CPU tensor.

Of elements of any type. Tokens are the first dimension.
"""


def bytes_of(rows: Rows) -> memoryview:
    """Return the bytes of ``rows``. Raises :class:`LayoutError` unless it is as :data:`Rows` describes."""
    if isinstance(rows, HostTensor):
        if not rows.is_contiguous():
            raise LayoutError("the KV tensor is not contiguous: pass tensor.contiguous()")
        if str(getattr(rows, "device", "cpu")) != "cpu":
            raise LayoutError("the KV tensor is not in host memory: pass tensor.cpu()")
        return _memory(rows.data_ptr(), rows.nbytes)
    if isinstance(rows, HostArray):
        return _bytes_of_array(rows)
    try:
        view = memoryview(rows)
    except TypeError as error:
        raise LayoutError(f"a {type(rows).__name__} is no KV: pass a buffer, an array or a tensor") from error
    if not view.c_contiguous:
        raise LayoutError("the KV buffer is not contiguous: pass a copy, such as bytes(buffer)")
    try:
        return view.cast("B")
    except TypeError:  # Elements that it cannot cast, such as those of ctypes.
        if view.readonly:
            return memoryview(view.tobytes())
        return memoryview((ctypes.c_char * view.nbytes).from_buffer(view)).cast("B")


def _bytes_of_array(array: Any) -> memoryview:  # noqa: ANN401 - numpy need not be installed
    """Return the bytes of an array of numpy, which exports no buffer of some types, such as bfloat16."""
    if array.dtype.hasobject:
        raise LayoutError("the KV array has Python objects as elements: pass an array of numbers")
    if not array.flags.c_contiguous:
        raise LayoutError("the KV array is not contiguous: pass numpy.ascontiguousarray(array)")
    view = _memory(array.ctypes.data, array.nbytes)
    return view if array.flags.writeable else view.toreadonly()


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def copy_all(copies: Sequence[tuple[memoryview, memoryview]]) -> None:
    """Copy each second memory to the beginning of the first."""
    for target, source in copies:
        target[: len(source)] = source
