"""`bench collectives`: how fast are rows carried between all ranks, alone and beside a product that fills the GPU?

Contenders: NCCL as it comes, in registered memory, and by its copy engines; our copies, our stores, and what `auto`
takes of the two; each called eagerly and as a part of a CUDA graph, one call a launch. Every output is compared with
the inputs of the ranks, element by element, before anything is timed.

A call is timed on the GPU, from its begin to the end of the wait, by `harness.turns`: the ranks begin together, and the
CPU has issued the call before.
`host_ms` is the CPU's time to issue it. `gb_per_s` are the bytes that leave each GPU for its peers in the median,
`of_best` the shortest median of all contenders at the size, over the contender's. Beside a product the time is that of
both, and `product_ms` that of the product alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import capture, counted
from dlrm_overlap.bench.harness.turns import Turns, greatest
from dlrm_overlap.bench.report.rows import report
from dlrm_overlap.bench.request import CollectivesRequest
from dlrm_overlap.comm.calls import fastest_way
from dlrm_overlap.comm.collectives import PeerCollectives
from dlrm_overlap.train.ranks import Ranks

_MB = 1 << 20
_WARM_UP_BYTES = 1 << 10  # to each rank
_PRODUCT = {"cuda": 8192, "cpu": 256}  # rows and columns of its matrices
_SHOWN = (
    "operation", "beside", "mb_per_peer", "captured", "contender", "way", "median_ms", "p10_ms", "p90_ms", "host_ms",
    "gb_per_s", "of_best", "product_ms",
)  # fmt: skip


class CollectiveContender(ABC):
    """One way to carry rows between all ranks, with an input and an output of its own choice."""

    def __init__(self, name: str, group: dist.ProcessGroup, device: torch.device, capacity_bytes: int) -> None:
        """Make the memory, `capacity_bytes` of the greatest output and of the greatest input; all ranks call this."""
        self.name, self.group, self.device = name, group, device
        self.input, self.output = self._memory(capacity_bytes)

    @abstractmethod
    def _memory(self, capacity_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [capacity_bytes] uint8 each: the memory of inputs and of outputs."""

    @abstractmethod
    def begin(self, operation: str, output: torch.Tensor, input: torch.Tensor, beside: str) -> Callable[[], object]:
        """Begin a collective on the current stream, and return the function that makes the stream wait for it."""

    def way(self, row_bytes: int, beside: str, captured: bool) -> str | None:
        """Return the way of the bytes, where there is a choice."""
        return None

    def close(self) -> None:
        """Give the memory back; all ranks call this."""
        self.input = self.output = torch.empty(0)


class GroupCollectives(CollectiveContender):
    """The process group's own: NCCL between GPUs, gloo between CPUs."""

    def _memory(self, capacity_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.empty(2, capacity_bytes, dtype=torch.uint8, device=self.device)
        return both[0], both[1]

    def begin(self, operation: str, output: torch.Tensor, input: torch.Tensor, beside: str) -> Callable[[], object]:
        """Begin NCCL's collective."""
        call: Any = dist.all_to_all_single if operation == "all_to_all" else dist.all_gather_into_tensor
        return call(output.view(-1), input.view(-1), group=self.group, async_op=True).wait


class RegisteredCollectives(GroupCollectives):
    """NCCL's, in memory that NCCL has allocated and registered; its copy engines take no other.

    `nccl_copy_engines` asks NCCL to take no multiprocessor (its zero-CTA policy), and so copy engines where it can.
    """

    def _memory(self, capacity_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        options: Any = dist.ProcessGroupNCCL.Options()
        if self.name == "nccl_copy_engines":
            options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO  # type: ignore[attr-defined]
        group: Any = dist.new_group(backend="nccl", pg_options=options, device_id=self.device)
        self.group = group
        warm_up = torch.zeros(group.size() * _WARM_UP_BYTES, dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(torch.empty_like(warm_up), warm_up, group=group)  # makes the communicator
        self._backend = group._get_backend(self.device)
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            made = super()._memory(capacity_bytes)
        self._backend.register_mem_pool(self._pool, symm=True)
        return made

    def close(self) -> None:
        """Take the memory off NCCL's list, and end the group."""
        super().close()
        self._backend.deregister_mem_pool(self._pool)
        dist.destroy_process_group(self.group)


class OwnCollectives(CollectiveContender):
    """`PeerCollectives`, by the way that is the contender's name."""

    def _memory(self, capacity_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._collectives = PeerCollectives(self.group, self.device, capacity_bytes, wait_timeout_s=60.0)
        output = self._collectives.empty((capacity_bytes,), torch.uint8)
        return torch.empty(capacity_bytes, dtype=torch.uint8, device=self.device), output

    def set_programs(self, programs: int) -> None:
        """Let the kernel of stores have so many programs, on GPUs."""
        flow: Any = self._collectives._flow
        flow.programs = programs

    def begin(self, operation: str, output: torch.Tensor, input: torch.Tensor, beside: str) -> Callable[[], object]:
        """Begin our own collective."""
        return getattr(self._collectives, operation)(output, input, self.name, beside).wait

    def way(self, row_bytes: int, beside: str, captured: bool) -> str | None:
        """Return the way, also that which auto chooses."""
        return fastest_way(row_bytes, beside, captured) if self.name == "auto" else self.name

    def close(self) -> None:
        """Give the memory back."""
        super().close()
        self._collectives.close()


def make_contenders(
    names: tuple[str, ...], group: dist.ProcessGroup, device: torch.device, capacity_bytes: int, programs: int
) -> list[CollectiveContender]:
    """Return the contenders of these names, on CPUs without those that need NCCL; all ranks call this."""
    made: list[CollectiveContender] = []
    for name in names:
        if not name.startswith("nccl"):
            made.append(own := OwnCollectives(name, group, device, capacity_bytes))
            own.set_programs(programs)
        elif name == "nccl" or device.type == "cuda":
            kind = GroupCollectives if name == "nccl" else RegisteredCollectives
            made.append(kind(name, group, device, capacity_bytes))
    return made


class _Call:
    """One contender's call at one size, eager or captured, perhaps beside a product."""

    def __init__(
        self, contender: CollectiveContender, operation: str, row_bytes: int, product: Callable[[], object] | None
    ) -> None:
        self.contender, self._operation, self._product = contender, operation, product
        ranks, elements = contender.group.size(), row_bytes // 4
        self._rank = contender.group.rank()
        self.output = contender.output[: ranks * row_bytes].view(torch.int32).view(ranks, elements)
        rows = ranks if operation == "all_to_all" else 1
        self.input = contender.input[: rows * row_bytes].view(torch.int32).view(rows, elements)
        self._numbers = torch.arange(elements, dtype=torch.int32, device=contender.device)

    def fill(self) -> None:
        """Fill the input with numbers of their sender and receiver, and poison the output."""
        for row, values in enumerate(self.input):
            torch.add(self._numbers, self._rank * len(self.output) + row, out=values)
        self.output.fill_(-1)

    def wrong(self) -> int:
        """Return how many elements of the output differ from the inputs that the ranks have sent here."""
        all_to_all, ranks = self._operation == "all_to_all", len(self.output)
        return sum(
            int((values != self._numbers + (rank * ranks + (self._rank if all_to_all else 0))).sum())
            for rank, values in enumerate(self.output)
        )

    def call(self) -> None:
        """Make the call eagerly."""
        source = self.input if self._operation == "all_to_all" else self.input[0]
        wait = self.contender.begin(self._operation, self.output, source, "compute" if self._product else "nothing")
        if self._product is not None:
            self._product()
        wait()


def run(request: CollectivesRequest, ranks: Ranks) -> int:
    """Measure the figure, print its table and append its rows on rank 0. All ranks call this.

    Returns:
        The exit code: 1 if an output was wrong; it has no row then.
    """
    group, device = ranks.connect(), ranks.device
    sizes_mb = request.sizes_on(device.type)
    capacity_bytes = max(sizes_mb) * _MB * group.size()
    contenders = make_contenders(request.contenders, group, device, capacity_bytes, request.store_programs)
    turns, multiply = Turns(group, device), _make_product(device)
    rows, faults = list[dict[str, Any]](), list[str]()
    with torch.no_grad():
        for operation in request.operations:
            for beside in ("nothing", "compute"):
                product = multiply if beside == "compute" else None
                for size in counted(f"sizes of {operation}", sizes_mb):
                    cases = [_Call(each, operation, size * _MB, product) for each in contenders]
                    columns = {"kind": request.kind, "operation": operation, "beside": beside, "mb_per_peer": size}
                    columns["store_programs"] = request.store_programs
                    measured, wrong = _measure(cases, turns, size * _MB, request.iterations, product, columns)
                    rows, faults = rows + measured, faults + wrong
                    del cases
    for each in contenders:
        each.close()
    if ranks.world.rank == 0:
        report(rows, faults, request.output, _SHOWN, "a call alone or beside a product")
    return 1 if faults else 0


def _make_product(device: torch.device) -> Callable[[], object]:
    size = _PRODUCT[device.type]
    left, out = torch.randn(size, size, device=device).bfloat16(), torch.empty(size, size, device=device).bfloat16()
    return lambda: torch.mm(left, left, out=out)


def _measure(
    cases: list[_Call],
    turns: Turns,
    row_bytes: int,
    iterations: int,
    product: Callable[[], object] | None,
    columns: dict[str, Any],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all contenders at one size, and a line for each whose output is wrong."""
    device, group = cases[0].contender.device, cases[0].contender.group
    ways = (False, True) if device.type == "cuda" else (False,)
    faults, found = list[str](), dict[tuple[bool, _Call], Callable[[], object]]()
    for case in cases:
        runs = dict[tuple[bool, _Call], Callable[[], object]]()
        for captured in ways:
            runs[captured, case] = capture(case.call, device) if captured else case.call
            case.fill()
            runs[captured, case]()
            (wrong,) = greatest([float(case.wrong())], device)
            if wrong:
                faults.append(f"{case.contender.name}, {columns}, captured {captured}: {wrong:.0f} elements are wrong")
                break
        else:
            found |= runs
    order = sorted(found, key=lambda key: key[0])
    pieces = [found[key] for key in order]
    timed = turns.time([*pieces, product] if product is not None else pieces, iterations)
    alone_ms = timed[-1].median_ms if product is not None else None
    rows = list[dict[str, Any]]()
    for (captured, case), times in zip(order, timed, strict=False):
        rows.append(
            columns
            | {
                "captured": captured,
                "contender": case.contender.name,
                "way": case.contender.way(row_bytes, columns["beside"], captured),
                "world_size": group.size(),
                "steps": iterations,
                **times._asdict(),
                "gb_per_s": (group.size() - 1) * row_bytes / times.median_ms / 1e6,
                "product_ms": alone_ms,
            }
        )
    for row in rows:
        best = min(other["median_ms"] for other in rows if other["captured"] == row["captured"])
        row["of_best"] = best / row["median_ms"]
    return rows, faults
