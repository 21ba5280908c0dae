"""The ways to run a product with its communication inside, behind one object of an owner.

    serial   the collective, then the product, or the other way round: NCCL's, or gloo's on CPUs
    chunks   the same part by part, NCCL's on a stream beside cuBLAS's
    copies   part by part, rows by copy engines, see `copies`
    pushes   an all-gather whose rows are sent into the peers' windows, see `pushes`
    tiles    by one kernel of our own, whose tiles wait for their rows or go to their owner, see `tiles`
    triggered  by the same kernel; what it has counted as complete leaves by copy engines, see `triggered`

`auto` takes what was measured to be the fastest, or else what is predicted to be, see `choose`. Within a capture
nothing is asked of other ranks, so a problem that has not been run before is refused there. Ranks whose calls differ
all raise an error that names both calls: on CPUs at any call, on GPUs where the call is new to all of them.
"""

import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.comm.every_rank import known_everywhere, on_every_rank, require_alike
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm.choose import Choice, choose, read_tuned, tuned_file
from dlrm_overlap.dense.gemm.chunks import Chunks
from dlrm_overlap.dense.gemm.linear import Layer
from dlrm_overlap.dense.gemm.ways import Finish, Problem, Products, Serial

log = logging.getLogger("dlrm_overlap")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # sums are float32, which would cut float64
WAYS = ("serial", "chunks", "copies", "pushes", "tiles", "triggered")


class ParallelProducts:
    """Both operators on the tensors of one device between the ranks of one group, without autograd.

    Example:
        products = parallel_products(None, device)
        out, _ = products.all_gather_matmul(x_shard, Layer(weight), "auto", keep=False)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.wait_timeout_s = group, device, 600.0
        """bound of a wait for a peer, of what is prepared from now on"""
        self.tuned_file = tuned_file(device, group.size())
        """where `auto` finds what has been measured; rank 0 reads it, when `auto` first chooses"""
        self._tuned: dict[str, dict[str, Any]] | None = None
        self._ways: dict[str, Products] = {}
        self._known: dict[tuple[Problem, str], Choice] = {}

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: Layer, way: str, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what `operators.all_gather_matmul` does and, if `keep`, the gathered rows [M, K]."""
        choice = self._choose("all_gather", x_shard, layer, way, keep)
        return self.way(choice.way).all_gather_matmul(*_as_kernels_read(x_shard, layer), choice.parts, keep)

    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, way: str) -> Finish:
        """Begin what `operators.matmul_reduce_scatter` does; what is returned, called once, returns its output."""
        choice = self._choose("reduce_scatter", x, layer, way)
        return self.way(choice.way).begin_reduce_scatter(*_as_kernels_read(x, layer), choice.parts)

    def _choose(self, operator: str, x: torch.Tensor, layer: Layer, way: str, keep: bool = False) -> Choice:
        fault, shards = _fault(x, layer, self.device), self.group.size() if operator == "all_gather" else 1
        rows, columns, inner = (0, 0, 0) if fault else (x.shape[0] * shards, *layer.weight.shape)
        problem = Problem(operator, rows, columns, inner, x.dtype, layer.bias is not None, layer.activation, keep)
        choice = self._known.get((problem, way)) if not fault else None
        everywhere = known_everywhere((problem, way), choice is not None, self.group, self.device)
        return choice if choice and everywhere else self._agree(problem, way, fault)

    @torch.inference_mode(False)  # what is made here serves training, too
    def _agree(self, problem: Problem, way: str, fault: str) -> Choice:
        """Check a problem on all ranks, choose its way and let that prepare; a collective on the host.

        Raises:
            InputError: on every rank, naming the fault.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InputError(
                f"{problem}: the first of its kind and within a capture, where the ranks cannot ask whether theirs are "
                f"alike; make one such call before the capture"
            )
        choice = Choice("serial")

        def check() -> None:
            nonlocal choice
            if fault:
                raise InputError(f"{problem.call}: {fault}")
            if problem.operator == "reduce_scatter" and problem.rows % self.group.size():
                raise InputError(
                    f"{problem}: {self.group.size()} ranks do not divide {problem.rows} rows; pad x to a multiple"
                )
            choice = self._pick(problem, way)

        on_every_rank(check, self.group)
        require_alike(f"{problem} by way {way}", self.group)
        if way == "auto":
            choice = self._choose_on_rank_0(problem)
        try:
            on_every_rank(lambda: self.way(choice.way).prepare(problem, choice.parts), self.group)
        except InputError as error:
            if way != "auto":
                raise
            log.warning("%s runs serially, since %s", problem, error)
            choice = Choice("serial")
        self._known[problem, way] = choice
        return choice

    def _pick(self, problem: Problem, way: str) -> Choice:
        if way == "auto":
            return Choice("serial")  # until rank 0 has chosen
        name, _, parts = way.partition("/")
        if name not in WAYS or not (parts.isdecimal() or not parts):
            raise InputError(
                f"{problem}: way {way} is not known; take auto, {', '.join(WAYS)}, or one with its parts: copies/4"
            )
        if fault := self.way(name).fault(problem):
            raise InputError(f"{problem}: way {way}: {fault}")
        known = [Choice(name, each) for each in self.way(name).parts]
        if not parts:
            return choose(problem, self.group.size(), known, {})
        if Choice(name, int(parts)) not in known:
            raise InputError(f"{problem}: way {way}: not known; take one of {', '.join(map(str, known))}")
        return Choice(name, int(parts))

    def candidates(self, problem: Problem) -> list[Choice]:
        """Return everything that can run a problem."""
        names = WAYS if self.device.type == "cuda" and self.group.size() > 1 else WAYS[:1]
        able = [self.way(name) for name in names if not self.way(name).fault(problem)]
        return [Choice(way.name, parts) for way in able for parts in way.parts_for(problem)]

    def _choose_on_rank_0(self, problem: Problem) -> Choice:
        """Return what rank 0 takes, whose file the others may not see; a collective on the host."""

        def chosen() -> Choice | None:
            if self.group.rank() != 0:
                return None
            if self._tuned is None:
                try:
                    self._tuned = read_tuned(self.tuned_file)
                except InputError as error:
                    log.warning("%s; ways of products are predicted", error)
                    self._tuned = {}
            return choose(problem, self.group.size(), self.candidates(problem), self._tuned)

        choices: list[Choice | None] = [None] * self.group.size()
        dist.all_gather_object(choices, on_every_rank(chosen, self.group), self.group)
        assert choices[0] is not None
        return choices[0]

    def use_tuned(self, path: Path) -> None:
        """Let `auto` choose anew, by the file at `path`; what is captured stays as it is. All ranks call this."""
        self.tuned_file, self._tuned = path, None
        self._known = {known: choice for known, choice in self._known.items() if known[1] != "auto"}

    def way(self, name: str) -> Products:
        """Return the way `name`, made at the first call."""
        if name not in self._ways:
            self._ways[name] = self._open(name)
        return self._ways[name]

    def _open(self, name: str) -> Products:
        if name == "serial":
            return Serial(self.group, self.device)
        if name == "chunks":
            return Chunks(self.group, self.device)
        if self.device.type != "cuda":
            raise InputError(f"way {name}: runs between GPUs; take serial or auto")
        from dlrm_overlap.dense.gemm.copies import Copies  # these need Triton, which a CPU does not
        from dlrm_overlap.dense.gemm.pushes import Pushes
        from dlrm_overlap.dense.gemm.tiles import Tiles
        from dlrm_overlap.dense.gemm.triggered import Triggered

        made = {"copies": Copies, "pushes": Pushes, "tiles": Tiles, "triggered": Triggered}[name]
        return made(self.group, self.device, self.wait_timeout_s)

    def check(self) -> None:
        """Raise what a wait on the GPU has recorded; waits for nothing.

        Raises:
            ExchangeTimeoutError: if a peer has not come in time, naming both ranks.
        """
        for way in self._ways.values():
            way.check()

    def close(self) -> None:
        """Give all memory back, once all that was issued is done. All ranks call this; the next call begins anew."""
        for way in self._ways.values():
            way.close()
        self._ways, self._known = {}, {}


def _fault(x: torch.Tensor, layer: Layer, device: torch.device) -> str:
    """Return what is wrong with an operator's arguments on this rank, or an empty text."""
    weight, bias, activation = layer
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return f"x {tuple(x.shape)}, weight {tuple(weight.shape)}: must be [rows, K] and [N, K]; reshape them"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias {tuple(bias.shape)}: must be [{weight.shape[0]}], as weight has rows; cut it as the weight"
    tensors = [x, weight] + ([] if bias is None else [bias])
    if any(tensor.dtype != x.dtype for tensor in tensors) or x.dtype not in _DTYPES:
        types = ", ".join(str(tensor.dtype) for tensor in tensors)
        return f"{types}: must be all float16, all bfloat16 or all float32; cast them"
    if any(tensor.device != device for tensor in tensors):
        return f"a tensor is not on {device}; move it there"
    if activation not in ("none", "relu"):
        return f"activation {activation}: not known; take none or relu"
    return ""


def _as_kernels_read(x: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, Layer]:
    """Return rows that are contiguous from a multiple of 16 bytes on, and a layer whose bias is contiguous."""
    x = x.contiguous()
    if x.data_ptr() % 16:  # a view; a kernel for it might have to be loaded within a capture
        x = x.clone()
    return x, layer if layer.bias is None else layer._replace(bias=layer.bias.contiguous())


@lru_cache
def _made(group: dist.ProcessGroup, device: torch.device) -> ParallelProducts:
    return ParallelProducts(group, device)


def parallel_products(group: dist.ProcessGroup | None, device: torch.device) -> ParallelProducts:
    """Return the object of a group (all ranks if None) and a device, the same at every call."""
    world = group or dist.group.WORLD
    assert world is not None
    return _made(world, device)
