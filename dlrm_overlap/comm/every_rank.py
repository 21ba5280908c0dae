"""What all ranks do, or call, alike: if one of them cannot, or does not, every rank raises it."""

import hashlib
from collections.abc import Callable
from typing import TypeVar, cast

import torch
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


def known_everywhere(call: object, known: bool, group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all ranks make this call and know it. On CPUs it is a collective, on GPUs this rank's guess.

    A rank that knows its call goes on to what the call itself does between ranks, which another one's first question
    about an unknown call then meets. On GPUs a bounded wait reports that. gloo ends the process at once where two
    ranks' sizes differ, so between CPUs all ask before every call, in 16 bytes.

    Args:
        call: whose text all ranks write alike; it is asked for on CPUs alone, where it does not delay a GPU.
        known: whether this rank has made it before.
        group: of the ranks.
        device: of the tensors that it is about.
    """
    if device.type != "cpu" or group.size() == 1:
        return known
    digest = hashlib.blake2b(str(call).encode(), digest_size=8).digest()
    mine = torch.tensor([int.from_bytes(digest, "little", signed=True), known])
    calls = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(calls, mine, group=group)
    digests, all_known = torch.stack(calls).unbind(1)
    return bool(all_known.all()) and bool((digests == digests[0]).all())
