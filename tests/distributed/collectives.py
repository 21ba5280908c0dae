"""Cases of `test_collectives`: all-to-all and all-gather into the peers' memory, by the host and by the kernels under
Triton's interpreter.

Ranks are late at random, and poison an output as soon as they have read it: a row that comes too early is poisoned, one
that is read too early is poison.
"""

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm import reach
from dlrm_overlap.comm.collectives import PeerCollectives, Way
from dlrm_overlap.comm.device_flow import DeviceFlow
from dlrm_overlap.comm.reach import Place
from dlrm_overlap.comm.record import ExchangeTimeoutError
from dlrm_overlap.config import InputError
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.agreement import assert_same
from tests.distributed.interpreted import without_streams
from tests.distributed.models import world

CPU = torch.device("cpu")
CAPACITY = 1 << 16
CULPRIT = 1
STEPS = 6
# Rows of 4 bytes, of odd sizes, of none, of more than one block.
Rows = list[tuple[tuple[int, ...], torch.dtype]]
ROWS: Rows = [
    ((1,), torch.float32),
    ((3, 7), torch.bfloat16),
    ((1025,), torch.int8),
    ((), torch.int64),
    ((0, 4), torch.float32),
    ((5, 4), torch.float32),
]

Opened = Callable[[float], PeerCollectives]


def open_on_host(timeout_s: float = 60.0) -> PeerCollectives:
    return PeerCollectives(world(), CPU, CAPACITY, timeout_s)


def open_on_device(timeout_s: float = 60.0) -> PeerCollectives:
    """Return what a GPU does, its kernels interpreted and its copies the host's; to be used in `without_streams`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PeerCollectives, "_open_flow", lambda self, bound: DeviceFlow(self._arena, bound))
        return PeerCollectives(world(), CPU, CAPACITY, timeout_s)


def sent_by(rank: int, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def _poison(output: torch.Tensor) -> None:
    output.view(-1).view(torch.uint8).fill_(0x7F)


def check_rows(open_: Opened, way: Way = "auto", rows: Rows = ROWS, device: torch.device = CPU) -> None:
    """Calls of either kind and every shape in turns, each output held against what the ranks have sent.

    Where its input lies is each rank's own affair. On GPUs, too.
    """
    rank, ranks, late = dist.get_rank(), dist.get_world_size(), random.Random(dist.get_rank())
    collectives = open_(60.0)
    outputs = [collectives.empty((ranks, *shape), dtype) for shape, dtype in rows]
    for step in range(STEPS):
        for output, (shape, dtype) in zip(outputs, rows, strict=True):
            time.sleep(late.choice([0, 0, 1e-3]))
            sent = [sent_by(peer, step, (ranks, *shape), dtype).to(device) for peer in range(ranks)]
            shift = (step + rank) % 4  # elements by which the input begins after a multiple of 16 bytes
            stored = torch.empty(sent[rank].numel() + shift, dtype=dtype, device=device)[shift:]
            stored = stored.view(sent[rank].shape).copy_(sent[rank])
            _poison(output)
            collectives.all_to_all(output, stored, way).wait()
            for peer in range(ranks):
                assert_same(output[peer], sent[peer][rank], f"step {step}: {shape} {dtype} of rank {peer}, all to all")
            _poison(output)
            mine = stored[rank]
            if step % 2:
                output[rank].copy_(mine)
                mine = output[rank]
            collectives.all_gather(output, mine, way).wait()
            for peer in range(ranks):
                assert_same(output[peer], sent[peer][peer], f"step {step}: {shape} {dtype} of rank {peer}, all gather")
            _poison(output)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()
    collectives.close()


def _mapped() -> set[str]:
    """Return the inodes of the arenas that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "(deleted)" in line}


def check_close() -> None:
    """`close` gives the memory back though the object lives, and an ended call."""
    before, ranks = _mapped(), dist.get_world_size()
    collectives = open_on_host()
    output = collectives.empty((ranks, 4), torch.float32)
    work = collectives.all_to_all(output, torch.zeros(ranks, 4))
    work.wait()
    arenas = _mapped() - before  # of this object: what an earlier case has left may go at any time
    assert arenas
    dist.barrier()
    del output
    collectives.close()
    assert not arenas & _mapped()
    assert work.is_done


def check_reach() -> None:
    """Ranks on devices without access to each other raise an error on every rank, before any memory is made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reach, "place_of", lambda device: Place("here", f"GPU {world().rank()}", frozenset()))
        with pytest.raises(InputError) as raised:
            open_on_host()
    told = str(raised.value)
    ranks = world().size()
    assert f"{ranks} ranks do not all reach each other's memory, but rank 0, rank 1" in told, told
    assert "(GPUs without access to each other); give a group of such ranks" in told, told


def _shorten(collectives: PeerCollectives, timeout_s: float) -> None:
    flow: Any = collectives._flow
    flow._timeout_s = timeout_s
    if isinstance(flow, DeviceFlow):
        flow._free = replace(flow._free, timeout=int(timeout_s * 1e9))


def check_dead_peer(open_: Opened, timeout_s: float) -> None:
    """All ranks but the culprit name the rank for which they wait in vain, in time."""
    collectives = open_(60.0)
    output = collectives.empty((dist.get_world_size(), 4), torch.float32)
    sent = torch.zeros_like(output)
    collectives.all_to_all(output, sent, "stores").wait()
    dist.barrier()
    _shorten(collectives, timeout_s)
    if dist.get_rank() != CULPRIT:
        began, told = time.monotonic(), ""
        try:
            collectives.all_to_all(output, sent, "stores")  # on a device the record is read before the wait for rows
            collectives.check()
        except ExchangeTimeoutError as error:
            told = str(error)
        assert f"for collective's flag 0 of rank {CULPRIT}: expected epoch 2, seen 1" in told, told
        assert time.monotonic() - began < 20
    dist.barrier()


def _interpreted(check: Callable[[], None]) -> None:
    with without_streams():
        check()


QUICK: dict[str, Callable[[], None]] = {
    "rows on the host": partial(check_rows, open_on_host),
    "close": check_close,
    "no access": check_reach,
    "dead peer on the host": partial(check_dead_peer, open_on_host, 0.3),
}
if INTERPRETED:
    QUICK |= {
        f"rows, kernels, {way}": partial(_interpreted, partial(check_rows, open_on_device, way))
        for way in ("dma", "stores")
    }
    # The interpreter counts turns, 1e9 a second.
    QUICK["dead peer, kernels"] = partial(_interpreted, partial(check_dead_peer, open_on_device, 3e-7))
