"""The ways to run a product with its communication inside; one object of an owner runs them.

    serial     the collective, then the product, or the other way round: NCCL's, or gloo's on CPUs
    copies     products of cuBLAS, part by part; copy engines send rows, or partial products
    tiles      one kernel of our own, whose tiles wait for their rows or go to their owner
    triggered  as tiles, but copy engines send the partial products that the kernel has counted as complete

`copies/4` is copies with a rank's rows in four parts. `auto` takes one of the first two by a rule, see `rule`. The
first call of its kind makes its memory, for which ranks wait for each other, so it may not be within a capture.
"""

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from dlrm_overlap.comm.every_rank import on_every_rank
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.gemm import serial
from dlrm_overlap.dense.gemm.problem import Finish, Layer, Problem
from dlrm_overlap.launching.environment import one_queue

if TYPE_CHECKING:
    from dlrm_overlap.dense.gemm.windows import Windows

log = logging.getLogger("dlrm_overlap")

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WAYS = ("serial", "copies", "tiles", "triggered")
_PARTS = (1, 2, 4, 8)  # into which all but serial may cut; at most `windows.SLOTS`
_TILED = ("tiles", "triggered")
_ALIGNED = 8  # elements that must divide N and K of these two, see `kernels.gemm.product`

# Of an H200 over NVLink, bfloat16: cuBLAS, and copies of 64 MB to each of three peers.
_FLOP_PER_US, _SENT_BYTES_PER_US = 800e6, 394e3
_FEW_BYTES, _MANY_BYTES = 8e6, 100e6


class Choice(NamedTuple):
    """A way, and into how many parts it cuts a rank's rows."""

    way: str
    parts: int = 1


def rule(problem: Problem, world_size: int) -> tuple[str, int]:
    """Return the way that `auto` takes where copy engines can run a problem, and how many parts suit every way.

    Flags, copies and the kernels that wait for them take some 20 us however little there is to send, so few bytes
    travel serially. One part suits a call whose product takes longer than its links, since all copies but the first or
    the last are hidden. Held against the rows of docs/results/gemm.md.

    Example: 2 ranks, an all-gather of 32768 rows of K 4096 in bfloat16. Each rank sends 134 MB in 341 us. With N 2048
    the product takes 687 us: copies, 1 part. With N 512 it takes 172: copies, 4 parts.
    """
    width = problem.inner if problem.operator == "all_gather" else problem.columns
    sent_bytes = (world_size - 1) * problem.rows // world_size * width * problem.dtype.itemsize
    if sent_bytes < _FEW_BYTES:
        return "serial", 1
    product_us = 2 * problem.rows * problem.columns * problem.inner / _FLOP_PER_US
    parts = 4 if sent_bytes >= _MANY_BYTES else 2
    return "copies", 1 if product_us >= sent_bytes / _SENT_BYTES_PER_US else parts


class ParallelProducts:
    """Both operators on the tensors of one device between the ranks of one group, without autograd.

    All ranks make the same calls in the same order, on one stream or on streams that are ordered one after the other.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.wait_timeout_s = 600.0
        """bound of a wait for a peer, of all windows; to be set before the first call"""
        self.windows: Windows | None = None
        """made at the first call between GPUs that is not serial"""
        self._runs: dict[tuple[str, str], Any] = {}
        self._known: dict[tuple[Problem, str], Choice] = {}

    def all_gather_matmul(
        self, x_shard: torch.Tensor, layer: Layer, way: str, keep: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output of `operators.all_gather_matmul` and, if `keep`, the gathered rows [M, K]."""
        choice = self._choose("all_gather", x_shard, layer, way, keep)
        return self.run("all_gather", choice.way)(*_as_kernels_read(x_shard, layer), choice.parts, keep)

    def begin_reduce_scatter(self, x: torch.Tensor, layer: Layer, way: str) -> Finish:
        """Begin `operators.matmul_reduce_scatter`; the function that is returned, called once, returns its output.

        Work that is issued in between runs beside the communication.
        """
        choice = self._choose("reduce_scatter", x, layer, way)
        return self.run("reduce_scatter", choice.way)(*_as_kernels_read(x, layer), choice.parts)

    def _choose(self, operator: str, x: torch.Tensor, layer: Layer, way: str, keep: bool = False) -> Choice:
        assert x.dtype in _DTYPES, "sums are float32, which would cut float64"
        rows = x.shape[0] * (self.group.size() if operator == "all_gather" else 1)
        columns, inner = layer.weight.shape
        problem = Problem(operator, rows, columns, inner, x.dtype, layer.bias is not None, layer.activation, keep)
        return self._known.get((problem, way)) or self._first(problem, way)

    @torch.inference_mode(False)  # memory that is made here serves training, too
    def _first(self, problem: Problem, way: str) -> Choice:
        """Choose the way of a problem and prepare it; a collective on the host.

        Raises:
            InputError: on every rank, naming the fault.
        """
        in_capture = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        assert not in_capture, f"{problem}: the first of its kind is in a capture"
        assert problem.rows % self.group.size() == 0, f"{problem}: {self.group.size()} ranks do not divide the rows"
        choice = self._pick(problem, way)
        try:
            on_every_rank(lambda: self._prepare(problem, choice), self.group)
        except InputError as error:
            if way != "auto":
                raise
            log.warning("%s runs serially, since %s", problem, error)
            choice = Choice("serial")
        self._known[problem, way] = choice
        return choice

    def _pick(self, problem: Problem, way: str) -> Choice:
        """Return the way and the parts that the text `way` names for a problem."""
        name, _, parts = way.partition("/")
        ruled, suited = rule(problem, self.group.size())
        if way == "auto":
            name = "serial" if self.fault(problem, ruled) else ruled
        elif name not in WAYS or not (parts.isdecimal() or not parts):
            raise InputError(
                f"{problem}: way {way} is not known; take auto, {', '.join(WAYS)}, or one with its parts: copies/4"
            )
        elif fault := self.fault(problem, name):
            raise InputError(f"{problem}: way {way}: {fault}")
        if name == "serial":
            return Choice("serial")
        if parts and int(parts) not in _PARTS:
            known = ", ".join(f"{name}/{each}" for each in _PARTS)
            raise InputError(f"{problem}: way {way}: not known; take one of {known}")
        return Choice(name, int(parts) if parts else suited)

    def fault(self, problem: Problem, way: str) -> str:
        """Return why a way cannot run a problem, or an empty text."""
        if way == "serial":
            return ""
        if self.device.type != "cuda" or self.group.size() == 1:
            return f"{way}: runs between GPUs; take serial or auto"
        if problem.dtype not in (torch.float16, torch.bfloat16):
            return f"{problem.dtype}: {way} takes float16 and bfloat16; cast, or take serial"
        if 0 in (problem.rows, problem.columns, problem.inner):
            return "there is nothing to multiply; take serial"
        if way in _TILED and one_queue():
            return (
                "CUDA_DEVICE_MAX_CONNECTIONS is 1, so a kernel and the copies that it waits for, or that wait for it, "
                "need not run side by side; unset it, or take copies"
            )
        if way in _TILED and (problem.columns % _ALIGNED or problem.inner % _ALIGNED):
            return f"{way} takes N and K that are multiples of {_ALIGNED}; pad them, or take copies"
        return ""

    def run(self, operator: str, way: str) -> Any:
        """Return the function that runs an operator one way, made at the first call."""
        if way == "serial":
            return partial(serial.gather if operator == "all_gather" else serial.scatter, self.group)
        if (operator, way) not in self._runs:
            from dlrm_overlap.dense.gemm import gathers, scatters  # these need Triton, which a CPU does not
            from dlrm_overlap.dense.gemm.windows import Windows

            kinds: dict[str, tuple[Any, Any]] = {
                "copies": (gathers.CopiedGather, scatters.CopiedScatter),
                "tiles": (gathers.TiledGather, scatters.TiledScatter),
                "triggered": (gathers.TiledGather, scatters.TriggeredScatter),
            }
            self.windows = self.windows or Windows(self.group, self.device, self.wait_timeout_s)
            self._runs[operator, way] = kinds[way][operator != "all_gather"](self.windows)
        return self._runs[operator, way]

    def _prepare(self, problem: Problem, choice: Choice) -> None:
        """Make memory and load kernels for a problem by calls with zeros.

        Raises:
            InputError: on every rank, if there is no room.
        """
        if choice.way == "serial":
            return
        run, gathers = self.run(problem.operator, choice.way), problem.operator == "all_gather"
        rows = problem.rows // self.group.size() if gathers else problem.rows
        x = torch.zeros(rows, problem.inner, dtype=problem.dtype, device=self.device)
        weight = x.new_zeros(problem.columns, problem.inner)
        bias = x.new_zeros(problem.columns) if problem.bias else None
        # Our own kernel is another one for a weight that is a transpose.
        for given in (weight, weight.t().contiguous().t()) if choice.way in _TILED else (weight,):
            layer = Layer(given, bias, "relu" if problem.activation == "relu" else "none")
            if gathers:
                run(x, layer, choice.parts, problem.keep)
            else:
                run(x, layer, choice.parts)()

    def check(self) -> None:
        """Raise the error that a wait on the GPU has recorded; waits for nothing.

        Raises:
            ExchangeTimeoutError: if a peer has not come in time, naming both ranks.
        """
        if self.windows is not None:
            self.windows.check()

    def close(self) -> None:
        """Give all memory back, once all that was issued is done. All ranks call this; the next call begins anew."""
        if self.windows is not None:
            self.windows.close()
        self.windows, self._runs, self._known = None, {}, {}


def _as_kernels_read(x: torch.Tensor, layer: Layer) -> tuple[torch.Tensor, Layer]:
    """Return rows that are contiguous from a multiple of 16 bytes on, and a layer whose bias is contiguous."""
    x = x.contiguous()
    if x.data_ptr() % 16:  # a view; a kernel for it might have to be loaded within a capture
        x = x.clone()
    return x, layer if layer.bias is None else layer._replace(bias=layer.bias.contiguous())
