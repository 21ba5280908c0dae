"""Work that every rank does: if it fails on one, all raise an error."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from dlrm_overlap.config import InputError, PeerError, in_one_line

Result = TypeVar("Result")


class _Fault(NamedTuple):
    """An exception as other ranks get it; the smallest fault by tuple order decides the error of all ranks."""

    is_mistake: bool
    """whether it is an `InputError`"""
    rank: int
    text: str

    def error(self) -> InputError | PeerError:
        if self.is_mistake:
            return InputError(f"{self.text} (rank {self.rank})")
        return PeerError(f"rank {self.rank} has failed: {self.text}")


def on_every_rank(work: Callable[[], Result], group: dist.ProcessGroup) -> Result:
    """Call `work`, and return its result once it has succeeded on every rank; a collective.

    Raises:
        InputError: if every failure is an `InputError`.
        PeerError: if some failure is another exception, which is raised on its own rank.
    """
    try:
        result = work()
    except Exception as error:
        is_mistake = isinstance(error, InputError)
        text = str(error) if is_mistake else f"{type(error).__name__}: {in_one_line(error):.300}"
        first = min(faults(_Fault(is_mistake, group.rank(), text), group))
        if first.is_mistake == is_mistake:
            raise
        raise first.error() from error
    if found := faults(None, group):
        raise min(found).error()
    return result


def gathered(value: Result, group: dist.ProcessGroup) -> list[Result]:
    """Return `value` of each rank, in order; a collective for which the host waits."""
    values = [value] * group.size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group)
    return values


def faults(fault: Result | None, group: dist.ProcessGroup) -> list[Result]:
    """Return the ranks' faults that are not None or "", in the order of ranks; a collective on the host."""
    return [each for each in gathered(fault, group) if each]
