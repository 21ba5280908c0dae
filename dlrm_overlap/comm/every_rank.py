"""What all ranks do, or call, alike: if one of them cannot, or does not, every rank raises it."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from dlrm_overlap.config import InputError

Made = TypeVar("Made")


def on_every_rank(work: Callable[[], Made], group: dist.ProcessGroup) -> Made:
    """Return what `work` makes on this rank, once it has been made on every rank of `group`; a collective.

    Raises:
        InputError: on every rank, if `work` has raised one on some rank, so that none waits for one that is gone.
    """
    made, fault = None, ""
    try:
        made = work()
    except InputError as error:
        fault = str(error)
    faults = [""] * group.size()
    dist.all_gather_object(faults, fault, group)
    for rank, text in enumerate(faults):
        if text:
            raise InputError(text if rank == group.rank() else f"{text} (rank {rank})")
    return cast(Made, made)


def require_alike(call: object, group: dist.ProcessGroup, caller: str = "") -> None:
    """Check that every rank of `group` makes the same call, as its text tells it; a collective on the host.

    Args:
        call: what this rank calls.
        caller: a word in front of the error.

    Raises:
        InputError: on every rank, naming the first rank whose call is not that of rank 0.
    """
    calls = [""] * group.size()
    dist.all_gather_object(calls, str(call), group)
    for rank, each in enumerate(calls):
        if each != calls[0]:
            raise InputError(
                f"{caller}rank 0 calls {calls[0]}, rank {rank} {each}; make the same calls in the same order on all "
                f"ranks"
            )
