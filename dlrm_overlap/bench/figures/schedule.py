"""`bench schedule`: in which order should a rank walk the destinations of its tasks?

Contenders: the baseline, and every backend that stores into its peers' memory, under each schedule and with the
configuration's put.
Extra columns: those of `Skew`, which say how evenly the ranks' own work is spread (arXiv 2305.06942); the baseline has
none. A rank's own work is the time of its step less the time in which it waits for other ranks.
"""

import itertools
from dataclasses import asdict, dataclass, fields, replace

import torch
import torch.distributed as dist

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.bench.harness.contenders import Baseline, Contender, Overlap
from dlrm_overlap.bench.harness.forward import Row, measure_forward
from dlrm_overlap.bench.harness.timing import gather
from dlrm_overlap.bench.harness.turns import begin_together, greatest
from dlrm_overlap.bench.harness.workload import Workload
from dlrm_overlap.bench.request import ForwardRequest
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.backends.base import Forward
from dlrm_overlap.embedding.options import ExchangeOptions
from dlrm_overlap.embedding.steps import BatchSizes, Step
from dlrm_overlap.kernels.schedule import SCHEDULES
from dlrm_overlap.observe.metrics import StepTimer, quantile
from dlrm_overlap.train.ranks import Ranks

_WARMUP_STEPS = 3
_LEAD_MS = 1.0  # in which the CPU issues a step, or the events would time the CPU


@dataclass(frozen=True)
class Skew:
    """The own work of the ranks; each number is the median over steps."""

    own_ms: float
    """own work of the rank that works longest"""
    skew_ms: float
    """difference between the ranks that work longest and shortest"""
    skew_fraction: float
    """that difference over the own work of the rank that works longest"""
    put_us: float | None = None
    """backends with slices, on GPUs: time that a program counts tasks, puts slices and raises their flags, its mean on
    a rank, the greatest of ranks; the stores of pooled rows are not part of it"""
    wait_us: float | None = None
    """likewise the time that a program waits for peers at the end"""


def run(request: ForwardRequest, ranks: Ranks) -> int:
    """Measure the figure on all ranks, which all call this, and return the exit code of `measure_forward`."""
    return measure_forward(request, ranks, _make_contenders, _skew_columns, shown=["skew_fraction"])


def _make_contenders(config: EmbeddingConfig, workload: Workload) -> list[Contender]:
    storing = [workload.exchange_options(config, name) for name, backend in BACKENDS.items() if backend.stores_to_peers]
    variants = [replace(options, schedule=schedule) for options in storing for schedule in SCHEDULES]
    return [Baseline(workload), *(Overlap(workload, variant) for variant in variants)]


def _skew_columns(contender: Contender, request: ForwardRequest) -> Row:
    if not isinstance(contender, Overlap):
        return dict.fromkeys(column.name for column in fields(Skew))
    return asdict(measure_skew(contender.workload, contender.options, request.iterations))


@torch.no_grad()
def measure_skew(workload: Workload, options: ExchangeOptions, steps: int) -> Skew:
    """Run `steps` steps, each begun by all ranks together, and return how their own work differs. All ranks call this.

    Own work is that of `start`: on GPUs a backend's kernel, on a CPU a rank's work before it waits. The kernel of a
    backend with slices waits at its end; its own work is the time from the start of the first task to the end of the
    last, which the kernel writes into a trace.
    """
    device, group = workload.device, workload.group
    traced = BACKENDS[options.backend].has_slices and device.type == "cuda"
    halves = workload.open_halves(replace(options, trace=traced, backward="collective"))
    own_ms: list[float] = []
    programs_us: list[tuple[float, float]] = []
    for ids in itertools.islice(itertools.cycle(workload.batches), _WARMUP_STEPS + steps):
        step = Step(list(ids.inputs), BatchSizes.of(workload.batch_sizes))
        timer = StepTimer(device)
        begin_together(group, device, _LEAD_MS)
        timer.mark()
        halves.forward.start(step)
        timer.mark()
        halves.forward.finish(step)
        own_ms += timer.take_ms()
        if traced:
            own_ms[-1], *of_programs = _read_trace(halves.forward)
            programs_us.append((of_programs[0], of_programs[1]))
    dist.barrier(group)
    halves.close()
    by_step = list(zip(*gather(own_ms[_WARMUP_STEPS:], device, group), strict=True))
    longest = [max(times) for times in by_step]
    skews = [max(times) - min(times) for times in by_step]
    means = [quantile(list(column), 0.5) for column in zip(*programs_us[_WARMUP_STEPS:], strict=True)]
    return Skew(
        quantile(longest, 0.5),
        quantile(skews, 0.5),
        quantile([skew / most for skew, most in zip(skews, longest, strict=True)], 0.5),
        *(greatest(means, device, group) if traced else ()),
    )


def _read_trace(forward: Forward) -> tuple[float, float, float]:
    """Return the last step's own work of this rank in ms, and a program's mean times to put and to wait in us."""
    from dlrm_overlap.embedding.backends.fused import SlicedForward
    from dlrm_overlap.kernels.forward.slices import TRACE_COLUMNS

    assert isinstance(forward, SlicedForward)
    trace = torch.cat(list(forward.traces.values()))
    column = {name: trace[:, i] for i, name in enumerate(TRACE_COLUMNS)}
    programs = column["program"].unique().numel()
    own_ns = column["end_ns"].max() - column["start_ns"].min()
    put_ns, wait_ns = column["put_ns"].sum(), column["wait_ns"].sum()
    return own_ns.item() / 1e6, put_ns.item() / 1e3 / programs, wait_ns.item() / 1e3 / programs
