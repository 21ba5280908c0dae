"""`bench collectives`: times all-to-alls, alone and during a matrix product that fills the GPU (column `beside`).

Contenders: NCCL and, on GPUs, copies and stores into the peers' memory, each eager and as a CUDA graph. Times include
the wait for the result and the product. The product alone takes `product_ms`.
"""

import itertools
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.bench.harness.communications import Communication, Payload, by_collective, wrong
from dlrm_overlap.bench.harness.timing import capture, time_alone
from dlrm_overlap.bench.rows import report
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.train.ranks import Ranks

_SIZES_MB = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512), "cpu": (1, 4)}
_MB = 1 << 20
_PRODUCT = {"cuda": 8192, "cpu": 256}  # rows and columns of its matrices
_SHOWN = (
    "beside", "mb_per_peer", "captured", "contender", "median_ms", "p10_ms", "p90_ms", "host_ms", "gb_per_s",
    "product_ms",
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    """Return `DISAGREEMENT` if the output of a contender was wrong; such a contender has no row."""
    group, device, values = ranks.connect(), ranks.device, ranks.values
    on_gpu = device.type == "cuda"
    sizes_mb = values.sizes_mb or _SIZES_MB[device.type]
    memory: Any = None
    if on_gpu:
        from dlrm_overlap.bench.harness.peer_memory import PeerMemory

        memory = PeerMemory(group, device, max(sizes_mb) * _MB // 4 * group.size())
    left, right = (torch.randn(_PRODUCT[device.type], _PRODUCT[device.type]).to(device, torch.bfloat16) for _ in "ab")
    product = partial(torch.mm, left, right, out=torch.empty_like(left))
    rows, faults = list[dict[str, Any]](), list[str]()
    # Each size alone and during the product, eager and captured.
    for mb in sizes_mb:
        payload = Payload(mb * _MB // 4, group, device)
        made = {"nccl": by_collective(payload)}
        made |= {way: memory.call(payload, way) for way in memory.ways} if memory else {}
        for other, captured in itertools.product((None, product), (False, True) if on_gpu else (False,)):
            columns = {"kind": kind, "operation": "all_to_all", "beside": "compute" if other else "nothing"}
            columns |= {"mb_per_peer": mb, "captured": captured, "world_size": group.size()}
            calls: dict[str, Callable[[], object]] = {name: partial(_call, each, other) for name, each in made.items()}
            if captured:
                calls = {name: capture(call, device) for name, call in calls.items()}
            # Check every result, then time the right ones in turns.
            bad = wrong({name: (made[name], call) for name, call in calls.items()})
            faults += [f"{name}, {columns}: the output is wrong; no time is reported" for name in bad]
            right_calls = {name: call for name, call in calls.items() if name not in bad}
            timed = time_alone([*right_calls.values(), product], values.iterations, device)
            rows += [
                columns
                | {"contender": name, **asdict(times), "gb_per_s": payload.link_bytes / times.median_ms / 1e6}
                | {"product_ms": timed[-1].median_ms if other else None}
                for name, times in zip(right_calls, timed, strict=False)
            ]
    if memory:
        memory.close()
    if ranks.world.rank == 0:
        report(rows, faults, Path(values.output), _SHOWN)
    return DISAGREEMENT if faults else 0


@torch.no_grad()
def _call(communication: Communication, product: Callable[[], object] | None) -> None:
    wait = communication.begin()
    if product is not None:
        product()
    wait()
