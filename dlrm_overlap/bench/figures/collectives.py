"""`bench collectives`: how fast are rows carried between all ranks, alone and beside a product that fills the GPU?

Contenders: NCCL as it comes; our copies, our stores, and what `auto` takes of the two; each called eagerly and as a
part of a CUDA graph, one call a launch. Every output is compared with the inputs of the ranks, element by element,
before anything is timed.

A call is timed on the GPU, from its begin to the end of the wait, by `harness.timing`. `gb_per_s` are the bytes that
leave each GPU for its peers in the median, `of_best` the shortest median of all contenders at the size, over the
contender's. Beside a product the time is that of both, and `product_ms` that of the product alone.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import Turns, capture, counted, greatest
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import CollectivesRequest
from dlrm_overlap.comm.calls import Beside, Way, fastest_way
from dlrm_overlap.comm.collectives import PeerCollectives
from dlrm_overlap.dense.gemm.serial import all_gather
from dlrm_overlap.train.ranks import Ranks

_MB = 1 << 20
_PRODUCT = {"cuda": 8192, "cpu": 256}  # rows and columns of its matrices
_CONTENDERS = ("nccl", *get_args(Way))
_PERIOD = 61  # of the contents
_ROOM_BYTES = 4096  # for alignment
_TIMEOUT_S = 60.0  # of a wait for a peer
_SHOWN = (
    "operation", "beside", "mb_per_peer", "captured", "contender", "way", "median_ms", "p10_ms", "p90_ms", "host_ms",
    "gb_per_s", "of_best", "product_ms",
)  # fmt: skip


class Rows:
    """The rows [W, n] float32 of an all-to-all or an all-gather on one rank, which every contender sends.

    The contents are made by formula, so every rank knows its result.
    """

    def __init__(
        self,
        operation: str,
        row_bytes: int,
        group: dist.ProcessGroup,
        collectives: PeerCollectives,
        memory: torch.Tensor,
    ) -> None:
        """Make the rows; `memory`, from `collectives`, has room for their result."""
        self.gathers, self.row_bytes = operation == "all_gather", row_bytes
        self._group, self._own, self._collectives = group, group.rank(), collectives
        numbers, ranks = torch.arange(row_bytes // 4, dtype=torch.int32, device=memory.device), range(group.size())

        def content(sender: int, row: int) -> torch.Tensor:
            return ((numbers + 3 * sender + 5 * row) % _PERIOD).float()

        own = self._own
        self._sent = content(own, 0) if self.gathers else torch.stack([content(own, row) for row in ranks])
        self._expected = torch.stack([content(sender, 0 if self.gathers else own) for sender in ranks])
        self._results = {"nccl": torch.empty_like(self._expected)}
        self._results |= dict.fromkeys(get_args(Way), memory[: self._expected.numel()].view_as(self._expected))

    @torch.no_grad()
    def call(self, contender: str, beside: Beside, product: Callable[[], object] | None) -> None:
        """Begin to send the rows, issue the product if there is one, and make the current stream wait for the rows."""
        result, by = self._results[contender], self._collectives
        source = result[self._own] if self.gathers else self._sent  # an all-gather finds its input in the result
        work: Any
        if contender != "nccl":
            work = (by.all_gather if self.gathers else by.all_to_all)(result, source, contender, beside)  # type: ignore[arg-type]
        elif self.gathers:
            work = all_gather(result.view(-1), source, group=self._group, async_op=True)
        else:
            work = dist.all_to_all_single(result, source, group=self._group, async_op=True)
        if product is not None:
            product()
        work.wait()

    def is_right(self, contender: str, run: Callable[[], object]) -> bool:
        """Return whether `run`, a call of the contender or a replay of it, leaves the right result. A collective."""
        result = self._results[contender]
        result.fill_(torch.nan)
        if self.gathers:
            result[self._own] = self._sent
        dist.barrier(self._group)  # no rank writes into a result that is yet to be destroyed
        run()
        return torch.equal(result, self._expected)


def run(request: CollectivesRequest, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if an output was wrong; it has no row then.
    """
    group, device = ranks.connect(), ranks.device
    sizes_mb = request.sizes_on(device.type)
    most_bytes = max(sizes_mb) * _MB * group.size()
    collectives = PeerCollectives(group, device, most_bytes + _ROOM_BYTES, _TIMEOUT_S)
    memory = collectives.empty((most_bytes // 4,), torch.float32)
    turns = Turns(group, device)
    product = _make_product(_PRODUCT[device.type], device)
    rows, faults = list[dict[str, Any]](), list[str]()
    for operation in request.operations:
        for mb in counted(f"sizes of {operation}", sizes_mb):
            sent = Rows(operation, mb * _MB, group, collectives, memory)
            for beside in get_args(Beside):
                for captured in (False, True)[: 1 + (device.type == "cuda")]:
                    columns = {"kind": request.kind, "operation": operation, "beside": beside, "mb_per_peer": mb}
                    columns |= {"captured": captured, "world_size": group.size()}
                    beside_it = product if beside == "compute" else None
                    found, bad = _measure(sent, turns, request.iterations, columns, beside_it)
                    rows, faults = rows + found, faults + bad
    collectives.close()
    if ranks.world.rank == 0:
        report(rows, faults, request.output, _SHOWN, "a call alone or beside a product")
    return 1 if faults else 0


def _measure(
    sent: Rows, turns: Turns, repetitions: int, columns: dict[str, Any], product: Callable[[], object] | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all contenders at one size, and a line for each whose output is wrong on some rank."""
    beside, captured = columns["beside"], columns["captured"]
    calls = {name: partial(sent.call, name, beside, product) for name in _CONTENDERS}
    pieces = {name: capture(call, turns.device) if captured else call for name, call in calls.items()}
    wrong = greatest([float(not sent.is_right(*each)) for each in pieces.items()], turns.device, turns.group)
    bad = [name for name, is_wrong in zip(pieces, wrong, strict=True) if is_wrong]
    faults = [f"{name}, {columns}: the output is wrong; no time is reported" for name in bad]
    pieces = {name: piece for name, piece in pieces.items() if name not in bad}
    timed = turns.time([*pieces.values(), *([product] if product else [])], repetitions)
    best = min(times.median_ms for times, _ in zip(timed, pieces, strict=False))
    link_bytes, auto = (turns.group.size() - 1) * sent.row_bytes, fastest_way(sent.row_bytes, beside, captured)
    rows = [
        columns
        | {"contender": name, "way": auto if name == "auto" else None if name == "nccl" else name}
        | asdict(times)
        | {"gb_per_s": link_bytes / times.median_ms / 1e6, "of_best": best / times.median_ms}
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
