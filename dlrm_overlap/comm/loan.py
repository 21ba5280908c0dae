"""Memory that is lent as a tensor, of which its owner knows whether anything still uses it."""

from collections.abc import Callable

import torch

_MOST_SHAPES = 64  # in which a region has been lent, of which something is kept: batch sizes rarely change


class Loan:
    """A region that is lent as a tensor, and knows whether anything still uses it."""

    def __init__(self, region: torch.Tensor) -> None:
        """Take a tensor [rows, columns] with a storage of its own."""
        self._region, self._storage = region, region.untyped_storage()
        self._columns, self._strides = region.shape[1], region.stride()
        self._count_users: Callable[[int], int] = torch._C._storage_Use_Count  # type: ignore[attr-defined]
        self._address = self._storage._cdata
        self._idle = self._count_users(self._address)
        self._shaped: dict[tuple[int, int], torch.Tensor] = {}
        """by rows and first column; they are not lent themselves"""

    def lend(self, rows: int, first_column: int = 0) -> torch.Tensor:
        """Return the first `rows` rows, from `first_column` on: a tensor of its own on the region's storage.

        A view would be one made within an autograd function, which autograd does not let anyone change in place.
        """
        shaped = self._shaped.get((rows, first_column))
        if shaped is None:
            shaped = self._shape(rows, first_column)
        return shaped.data  # no view, in a fifth of the time that a tensor takes to be made

    def _shape(self, rows: int, first_column: int) -> torch.Tensor:
        """Make and keep the tensor of these rows and columns, which counts as one user of the idle storage."""
        if len(self._shaped) >= _MOST_SHAPES:
            self._idle -= len(self._shaped)
            self._shaped.clear()
        shape = rows, self._columns - first_column
        with torch.inference_mode(False):  # else no later step could save it for its backward
            shaped = self._region.new_empty(0).set_(self._storage, first_column, shape, self._strides)
        self._shaped[rows, first_column] = shaped
        self._idle += 1
        return shaped

    @property
    def held(self) -> bool:
        """Whether a tensor that was lent lives, or a view of one, or a graph that saved one."""
        return self._count_users(self._address) > self._idle


class CudaMemory:
    """GPU memory as `torch.as_tensor` takes it: without a copy, into a tensor with a storage of its own."""

    def __init__(self, address: int, size_bytes: int, holds: object = None) -> None:
        """Take bytes at an address, and what keeps them alive."""
        self._holds = holds
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }
