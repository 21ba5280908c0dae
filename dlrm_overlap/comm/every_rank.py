"""Work that is alike on all ranks: if one of them cannot do its own, every rank raises an error."""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch.distributed as dist

from dlrm_overlap.config import InputError, PeerError, in_one_line

Made = TypeVar("Made")


class _Fault(NamedTuple):
    """An exception, as the other ranks need it; the least one decides for all ranks."""

    is_mistake: bool
    """whether it is an `InputError`"""
    rank: int
    text: str

    def error(self) -> InputError | PeerError:
        """Return the error of the ranks that have no such exception of their own."""
        if self.is_mistake:
            return InputError(f"{self.text} (rank {self.rank})")
        return PeerError(f"rank {self.rank} has failed: {self.text}")


def on_every_rank(work: Callable[[], Made], group: dist.ProcessGroup) -> Made:
    """Do `work`, and return its result once every rank of `group` has its own; a collective.

    A rank whose `work` raises an exception raises it when all ranks know of it, so that none waits for one that is
    gone. All ranks raise the same kind of error, since a caller may go on after a mistake: where one rank raises an
    `InputError` and another is out of memory, the former raises a `PeerError`.

    Raises:
        InputError: on every rank, if `work` has raised one on some rank, and nothing else on any.
        PeerError: on the ranks that have no such exception of their own, if `work` has raised another one on some rank.
    """
    try:
        made = work()
    except Exception as error:
        is_mistake = isinstance(error, InputError)
        text = str(error) if is_mistake else f"{type(error).__name__}: {in_one_line(error):.300}"
        first = min(faults(_Fault(is_mistake, group.rank(), text), group))
        if first.is_mistake == is_mistake:
            raise
        raise first.error() from error
    if found := faults(None, group):
        raise min(found).error()
    return made


def gathered(value: Made, group: dist.ProcessGroup) -> list[Made]:
    """Return the value of each rank of `group`, in order; a collective on the host."""
    values = [value] * group.size()
    if len(values) > 1:
        dist.all_gather_object(values, value, group)
    return values


def faults(fault: Made | None, group: dist.ProcessGroup) -> list[Made]:
    """Return the faults of the ranks of `group` that have one, in order; None and an empty string are none."""
    return [each for each in gathered(fault, group) if each]
