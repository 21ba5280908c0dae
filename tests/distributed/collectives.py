"""Cases of `test_collectives`: all-to-alls into the peers' memory, kernels under Triton's interpreter."""

import random
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.communications import Payload, wrong
from dlrm_overlap.bench.harness.peer_memory import PeerMemory
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.distributed.interpreted import without_streams
from tests.distributed.models import CPU, world

PARTS = (1, 7, 9001)
"""float32 elements of a row: of odd sizes, and of more than a block of the kernel"""
STEPS = 2


def check_rows(way: str, group: dist.ProcessGroup, device: torch.device = CPU) -> None:
    """Calls of all sizes alternate, and ranks are late at random. Used on GPUs, too."""
    late = random.Random(group.rank())
    memory = PeerMemory(group, device, group.size() * max(PARTS))
    payloads = [Payload(part, group, device) for part in PARTS]
    for _ in range(STEPS):
        for payload in payloads:
            call = memory.call(payload, way)

            def run(run: Callable[[], object] = call.run) -> None:
                time.sleep(late.choice([0, 0, 1e-3]))
                run()

            assert not wrong({way: (call, run)}), (way, payload.part)
    memory.close()


def _interpreted(way: str) -> None:
    with without_streams():
        check_rows(way, world())


QUICK: dict[str, Callable[[], None]] = (
    {way: partial(_interpreted, way) for way in PeerMemory.ways} if INTERPRETED else {}
)
