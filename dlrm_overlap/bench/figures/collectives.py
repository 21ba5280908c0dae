"""`bench collectives`: how fast are rows carried between all ranks, alone and beside a product that fills the GPU?

Contenders: NCCL as it comes and, between GPUs, copies and stores into the peers' memory; each called eagerly and as a
part of a CUDA graph, one call a launch. Every output is compared with the inputs of the ranks, element by element,
before anything is timed.

A call is timed on the GPU, from its begin to the end of the wait, by `harness.timing`. `gb_per_s` are the bytes that
leave each GPU for its peers in the median, `of_best` the shortest median of all contenders at the size, over the
contender's. Beside a product the time is that of both, and `product_ms` that of the product alone.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dlrm_overlap.bench.harness.communications import Communication, Payload, by_collective, wrong
from dlrm_overlap.bench.harness.timing import Turns, capture, counted
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import CollectivesRequest
from dlrm_overlap.train.ranks import Ranks

if TYPE_CHECKING:
    from dlrm_overlap.bench.harness.peer_memory import PeerMemory

_MB = 1 << 20
_PRODUCT = {"cuda": 8192, "cpu": 256}  # rows and columns of its matrices
_SHOWN = (
    "operation", "beside", "mb_per_peer", "captured", "contender", "median_ms", "p10_ms", "p90_ms", "host_ms",
    "gb_per_s", "of_best", "product_ms",
)  # fmt: skip


def run(request: CollectivesRequest, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if an output was wrong; it has no row then.
    """
    group, device = ranks.connect(), ranks.device
    sizes_mb = request.sizes_on(device.type)
    memory = None
    if device.type == "cuda":
        from dlrm_overlap.bench.harness.peer_memory import PeerMemory

        memory = PeerMemory(group, device, max(sizes_mb) * _MB // 4 * group.size())
    turns = Turns(group, device)
    product = _make_product(_PRODUCT[device.type], device)
    rows, faults = list[dict[str, Any]](), list[str]()
    for operation in request.operations:
        for mb in counted(f"sizes of {operation}", sizes_mb):
            payload = Payload(operation, mb * _MB // 4, group, device)
            for beside in ("nothing", "compute"):
                for captured in (False, True)[: 1 + (device.type == "cuda")]:
                    columns = {"kind": request.kind, "operation": operation, "beside": beside, "mb_per_peer": mb}
                    columns |= {"captured": captured, "world_size": group.size()}
                    beside_it = product if beside == "compute" else None
                    found, bad = _measure(payload, memory, turns, request.iterations, columns, beside_it)
                    rows, faults = rows + found, faults + bad
    if memory is not None:
        memory.close()
    if ranks.world.rank == 0:
        report(rows, faults, request.output, _SHOWN, "a call alone or beside a product")
    return 1 if faults else 0


def _measure(
    payload: Payload,
    memory: "PeerMemory | None",
    turns: Turns,
    repetitions: int,
    columns: dict[str, Any],
    product: Callable[[], object] | None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all contenders at one size, and a line for each whose output is wrong."""
    made = {"nccl": by_collective(payload)}
    if memory is not None:
        made |= {way: memory.call(payload, way) for way in memory.ways}
    calls = {name: (each, _with(each, product)) for name, each in made.items()}
    if columns["captured"]:
        calls = {name: (each, capture(call, payload.device)) for name, (each, call) in calls.items()}
    bad = wrong(calls)
    faults = [f"{name}, {columns}: the output is wrong; no time is reported" for name in bad]
    pieces = {name: call for name, (_, call) in calls.items() if name not in bad}
    timed = turns.time([*pieces.values(), *([product] if product else [])], repetitions)
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


def _with(communication: Communication, product: Callable[[], object] | None) -> Callable[[], object]:
    """Return the function that begins the communication, issues the product, and waits for the communication."""

    @torch.no_grad()
    def call() -> None:
        wait = communication.begin()
        if product is not None:
            product()
        wait()

    return call
