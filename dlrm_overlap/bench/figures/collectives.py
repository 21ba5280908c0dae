"""`bench collectives`: how fast are rows carried between all ranks, alone and beside a product that fills the GPU?

Contenders: NCCL as it comes and, between GPUs, copies and stores into the peers' memory; each called eagerly and as a
part of a CUDA graph, one call a launch. Every output is compared with the inputs of the ranks, element by element,
before anything is timed.

A call is timed on the GPU, from its begin to the end of the wait, by `harness.timing`. `gb_per_s` are the bytes that
leave each GPU for its peers in the median, `of_best` the shortest median of all contenders at the size, over the
contender's. Beside a product the time is that of both, and `product_ms` that of the product alone.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.bench.harness.communications import Communication, Payload, by_collective, wrong
from dlrm_overlap.bench.harness.timing import capture, counted, time_alone
from dlrm_overlap.bench.rows import report
from dlrm_overlap.train.ranks import Ranks

_SIZES_MB = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512), "cpu": (1, 4)}
_MB = 1 << 20
_PRODUCT = {"cuda": 8192, "cpu": 256}  # rows and columns of its matrices
_SHOWN = (
    "operation", "beside", "mb_per_peer", "captured", "contender", "median_ms", "p10_ms", "p90_ms", "host_ms",
    "gb_per_s", "of_best", "product_ms",
)  # fmt: skip


def run(kind: str, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if an output was wrong; it has no row then.
    """
    group, device, values = ranks.connect(), ranks.device, ranks.values
    on_gpu = device.type == "cuda"
    sizes_mb = values.sizes_mb or _SIZES_MB[device.type]
    memory: Any = None
    if on_gpu:
        from dlrm_overlap.bench.harness.peer_memory import PeerMemory

        memory = PeerMemory(group, device, max(sizes_mb) * _MB // 4 * group.size())
    product = _make_product(_PRODUCT[device.type], device)
    rows, faults = list[dict[str, Any]](), list[str]()
    for operation in values.operations:
        for mb in counted(f"sizes of {operation}", sizes_mb):
            payload = Payload(operation, mb * _MB // 4, group, device)
            made = {"nccl": by_collective(payload)}
            made |= {way: memory.call(payload, way) for way in memory.ways} if memory else {}
            for beside, captured in itertools.product((None, product), (False, True) if on_gpu else (False,)):
                columns = {"kind": kind, "operation": operation, "beside": "compute" if beside else "nothing"}
                columns |= {"mb_per_peer": mb, "captured": captured, "world_size": group.size()}
                found, bad = _measure(payload, made, beside, values.iterations, columns)
                rows, faults = rows + found, faults + bad
    if memory:
        memory.close()
    if ranks.world.rank == 0:
        report(rows, faults, Path(values.output), _SHOWN)
    return 1 if faults else 0


def _measure(
    payload: Payload,
    made: Mapping[str, Communication],
    product: Callable[[], object] | None,
    repetitions: int,
    columns: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all contenders at one size, and a line for each whose output is wrong."""
    calls: dict[str, Callable[[], object]] = {name: partial(_call, each, product) for name, each in made.items()}
    if columns["captured"]:
        calls = {name: capture(call, payload.device) for name, call in calls.items()}
    bad = wrong({name: (each, calls[name]) for name, each in made.items()})
    faults = [f"{name}, {columns}: the output is wrong; no time is reported" for name in bad]
    pieces = {name: call for name, call in calls.items() if name not in bad}
    timed = time_alone([*pieces.values(), *([product] if product else [])], repetitions, payload.device, payload.group)
    best = min(times.median_ms for times, _ in zip(timed, pieces, strict=False))
    rows = [
        columns
        | {"contender": name}
        | asdict(times)
        | {"gb_per_s": payload.link_bytes / times.median_ms / 1e6, "of_best": best / times.median_ms}
        | {"product_ms": timed[-1].median_ms if product else None}
        for name, times in zip(pieces, timed, strict=False)
    ]
    return rows, faults


def _make_product(size: int, device: torch.device) -> Callable[[], object]:
    """Return a function that issues a product of two matrices [size, size] in bf16."""
    generator = torch.Generator(device).manual_seed(0)
    make = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    left, right = make(size, size), make(size, size)
    return partial(torch.mm, left, right, out=torch.empty_like(left))


@torch.no_grad()
def _call(communication: Communication, product: Callable[[], object] | None) -> None:
    """Begin a communication, issue the product, and wait for the communication."""
    wait = communication.begin()
    if product is not None:
        product()
    wait()
