"""What steps make once and use again: bounded, but for what CUDA graphs go on reading."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

_MOST = 64  # values that no capture has used: batch sizes and learning rates rarely change


class _Made(Generic[Value]):
    """One value, and who needs it."""

    __slots__ = ("asked", "captured", "value")

    def __init__(self, value: Value) -> None:
        self.value = value
        self.asked = 0
        """the number of the request that asked for it last"""
        self.captured = False
        """whether a capture has used it"""


class StepCache(Generic[Key, Value]):
    """What was made for each key, such as the sizes of a batch: the values asked for last, and all that captures used.

    A CUDA graph holds the addresses of the tensors that its kernels were captured with, and no reference to them. If
    such a tensor is given away, the next replay reads and writes what others have put there. So a value that is asked
    for while the current stream is being captured is held until `clear`, whoever owns the graph. Of all other values
    the 64 asked for last are kept: kernels that read them have been issued before what gets their memory next.

    A value must hold what it is made of. A `Launch` does; an address, which is a number, does not.

    Example: a step is captured, then 100 batches of 100 other sizes are evaluated, then the graph is launched. What was
    made for the captured step is still there, beside what was made for the last 64 sizes.
    """

    def __init__(self) -> None:
        self._made: dict[Key, _Made[Value]] = {}
        self._others = 0  # of these that no capture has used
        self._asked = 0
        self._replaced: list[_Made[Value]] = []
        """what captures have used and nobody is given any more"""

    def __len__(self) -> int:
        """Return how many keys have a value."""
        return len(self._made)

    def get(self, key: Key, make: Callable[[], Value]) -> Value:
        """Return the value of `key`; where there is none, `make` returns it, which may call `forget`, but not `get`."""
        found = self._made.get(key)
        if found is None:
            found = _Made(make())
            if self._others >= _MOST:
                self._forget_oldest()
            self._made[key] = found
            self._others += 1
        self._asked = found.asked = self._asked + 1
        if not found.captured and is_capturing():
            found.captured = True
            self._others -= 1
        return found.value

    def _forget_oldest(self) -> None:
        others = [(made.asked, key) for key, made in self._made.items() if not made.captured]
        del self._made[min(others, key=lambda other: other[0])[1]]
        self._others -= 1

    def forget(self) -> None:
        """Let all values be made anew, since what they were made of is another; what captures have used is held."""
        self._replaced += [made for made in self._made.values() if made.captured]
        self._made, self._others = {}, 0

    def clear(self) -> None:
        """Forget all, once no graph will be launched any more that has used some of it."""
        self._made, self._others, self._replaced = {}, 0, []


def is_capturing() -> bool:
    """Return whether what is issued on the current stream now is captured in a CUDA graph; False where CUDA is not."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
