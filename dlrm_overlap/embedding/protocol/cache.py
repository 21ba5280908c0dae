"""What steps make once and use again: bounded, but for what CUDA graphs go on reading."""

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar, TypeVarTuple

from torch.cuda import is_current_stream_capturing, is_initialized

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Arguments = TypeVarTuple("Arguments")

_MOST = 64  # values that no capture has used: batch sizes and learning rates rarely change
_NONE: Any = object()


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
        self._captured: dict[Key, Value] = {}
        """what captures have used"""
        self._others: dict[Key, Value] = {}
        """the rest, what was asked for longest ago first"""
        self._replaced: list[Value] = []
        """what captures have used and nobody is given any more"""

    def __len__(self) -> int:
        """Return how many keys have a value."""
        return len(self._captured) + len(self._others)

    def get(self, key: Key, make: Callable[[*Arguments], Value], *arguments: *Arguments) -> Value:
        """Return the value of `key`.

        Args:
            key: of all that the value depends on.
            make: returns the value where there is none; it may call `forget`, but not `get`.
            arguments: of `make`.
        """
        value = self._others.pop(key, _NONE)  # a step asks often: to take it out and to put it back last is cheap
        if value is _NONE:
            if key in self._captured:
                return self._captured[key]
            value = make(*arguments)
            if len(self._others) >= _MOST:
                del self._others[next(iter(self._others))]
        if is_capturing():
            self._captured[key] = value
        else:
            self._others[key] = value
        return value

    def forget(self) -> None:
        """Let all values be made anew, since what they were made of is another; what captures have used is held."""
        self._replaced += self._captured.values()
        self._captured, self._others = {}, {}

    def clear(self) -> None:
        """Forget all, once no graph will be launched any more that has used some of it."""
        self._captured, self._others, self._replaced = {}, {}, []


def is_capturing() -> bool:
    """Return whether what is issued on the current stream now is captured in a CUDA graph; False where CUDA is not."""
    return is_initialized() and is_current_stream_capturing()
