"""Where the CPU's time of an eager step goes, part by part, for contenders of `bench step`.

    torchrun --nproc-per-node 2 -m tests.gpu.host_time --config configs/bench/step_mlperf.yaml

Parts are the stages of TorchRec's pipeline and, within them, those of the sharded module and of our exchange. For each
it prints, per step on rank 0: `ms` and, without the parts inside it, `own_ms`, both untraced; and from a trace of other
steps the number of operators, of launches, of copies and fills, of waits for the GPU, and the ms of these waits. With
`--functions N` it then lists the N Python functions that take longest by cProfile, which makes Python slower.
"""

import cProfile
import pstats
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable, ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward

from dlrm_overlap.bench.figures.step import build, contender_configs
from dlrm_overlap.bench.harness.training_runs import TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.config import PositiveInt
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.observe.trace_summary import read_events
from dlrm_overlap.train.model import BottomMLP, Head, Loss
from dlrm_overlap.train.ranks import Ranks, run_on_ranks

_STEPS, _TRACED, _PREFIX = 20, 10, "part "
# Methods whose time is a part's.
_PARTS: Mapping[Any, tuple[str, ...]] = {
    TrainPipelineSparseDist: (
        "progress", "enqueue_batch", "_wait_for_batch", "start_sparse_data_dist", "wait_sparse_data_dist", "_backward",
        "dequeue_batch",
    ),
    PipelinedForward: ("__call__",),
    ShardedEmbeddingBagCollection: ("input_dist", "compute_and_output_dist"),
    OverlapShardedEmbeddingBagCollection: ("input_dist", "compute_and_output_dist"),
    EmbeddingBagCollectionAwaitable: ("_wait_impl",),
    Exchange: ("start_forward", "expect_gradient", "finish_forward", "start_backward", "finish_backward"),
    BottomMLP: ("forward",),
    Head: ("forward",),
    Loss: ("forward",),
}  # fmt: skip
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync", "cudaMemcpy", "cudaMemset")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


class Parts:
    """Times of parts; parts nest within a thread."""

    def __init__(self) -> None:
        self.ms = defaultdict[str, float](float)
        self.own_ms = defaultdict[str, float](float)
        self.calls = defaultdict[str, int](int)
        self._inside = threading.local()
        self.traces = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.traces:
                with record_function(_PREFIX + name):
                    return function(*args, **kwargs)
            inside: list[float] = vars(self._inside).setdefault("stack", [])
            inside.append(0.0)
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                ms = (time.perf_counter() - began) * 1e3
                self.ms[name] += ms
                self.own_ms[name] += ms - inside.pop()
                self.calls[name] += 1
                if inside:
                    inside[-1] += ms

        return run

    @contextmanager
    def of(self, trainer: Any) -> Iterator[None]:
        """Time the parts of a trainer's steps in the block."""
        methods = [(owner, name) for owner, names in _PARTS.items() for name in names if hasattr(owner, name)]
        optimizer = trainer.optimizer
        methods += [(optimizer, name) for name in ("zero_grad", "step")]
        before = [(owner, name, vars(owner).get(name)) for owner, name in methods]
        for owner, name in methods:
            kind = owner.__name__ if isinstance(owner, type) else "optimizer"
            setattr(owner, name, self.timed(f"{kind}.{name}", getattr(owner, name)))
        try:
            yield
        finally:
            for owner, name, was in before:
                delattr(owner, name) if was is None else setattr(owner, name, was)


def count_calls(events: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the numbers of a trace's calls, each for the innermost part around it; `waits_ms` are their ms."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    by_thread = defaultdict[Any, list[dict[str, Any]]](list)
    for event in events:
        if event.get("cat") in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"):
            by_thread[event["tid"]].append(event)
    for thread in by_thread.values():
        parts, operators_end = list[tuple[float, str]](), 0.0
        for event in sorted(thread, key=lambda each: (each["ts"], -each["dur"])):
            begin, end, name = event["ts"], event["ts"] + event["dur"], event["name"]
            while parts and parts[-1][0] <= begin:
                parts.pop()
            if event["cat"] == "user_annotation":
                if name.startswith(_PREFIX):
                    parts.append((end, name.removeprefix(_PREFIX)))
                continue
            counts = found[parts[-1][1] if parts else "(outside)"]
            if event["cat"] == "cpu_op":
                counts["ops"] += begin >= operators_end  # outermost operators only
                operators_end = max(operators_end, end)
            else:
                counts["launches"] += name in _LAUNCHES
                counts["copies"] += name in _COPIES
                counts["waits"] += name in _WAITS
                counts["waits_ms"] += (name in _WAITS) * event["dur"] / 1e3
    return found


def measure(ranks: Ranks, run: TrainingRun, functions: int) -> str:
    trainer, parts = run.trainer, Parts()
    plain = run.time(4 * _STEPS)
    with parts.of(trainer):
        steps = _counted(lambda: run.time(_STEPS))
        parts.traces = True
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            traced_steps = _counted(lambda: run.time(_TRACED))
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(path := f"{folder}/trace.json")
        counts = count_calls(read_events(Path(path)))
    numbers = ("ops", "launches", "copies", "waits", "waits_ms")
    names = sorted({*parts.ms, *counts}, key=lambda name: -parts.own_ms[name])
    lines = [["part", "calls", "ms", "own_ms", *numbers]]
    for name in names:
        times = [parts.calls[name] / steps, parts.ms[name] / steps, parts.own_ms[name] / steps]
        lines.append([name, *(f"{each:.3g}" for each in (*times, *(counts[name][n] / traced_steps for n in numbers)))])
    total = [sum(each[n] for each in counts.values()) / traced_steps for n in numbers]
    lines.append(["(all)", "", "", f"{sum(parts.own_ms.values()) / steps:.3g}", *(f"{each:.3g}" for each in total)])
    step_ms, host_ms = map(statistics.median, plain)
    text = f"{run.name}: {step_ms:.2f} ms a step, {host_ms:.2f} ms of it in progress()\n{format_table(lines)}"
    return text + (f"\n{_functions(run, functions)}" if functions else "")


def _counted(time_steps: Callable[[], Any]) -> int:
    """Return how many steps `time_steps` takes, with its warm-up."""
    steps, progress = [0], TrainPipelineSparseDist.progress

    def count(*args: Any) -> Any:
        steps[0] += 1
        return progress(*args)

    TrainPipelineSparseDist.progress = count  # type: ignore[method-assign]
    try:
        time_steps()
    finally:
        TrainPipelineSparseDist.progress = progress  # type: ignore[method-assign]
    return steps[0]


def _functions(run: TrainingRun, most: int) -> str:
    """Return the functions that take longest; the backward runs in the same thread, so that it is included."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        run.time(1)
        profiler.enable()
        run.time(_STEPS)
        profiler.disable()
    stats: Any = pstats.Stats(profiler)
    pipeline = "train_pipelines.py", "progress"
    steps = next(each[0] for where, each in stats.stats.items() if (Path(where[0]).name, where[2]) == pipeline)
    lines, calls = [["function", "calls", "own_ms", "ms"]], 0.0
    for where, (_, count, own, whole, _) in sorted(stats.stats.items(), key=lambda each: -each[1][2]):
        calls += count / steps
        if len(lines) <= most:
            name = f"{'/'.join(Path(where[0]).parts[-2:])}:{where[1]} {where[2]}"[-70:]
            lines.append([name, f"{count / steps:.3g}", f"{own / steps * 1e3:.3f}", f"{whole / steps * 1e3:.3f}"])
    return f"{calls:.0f} calls of Python functions a step\n{format_table(lines)}"


def work(ranks: Ranks) -> int:
    names = ranks.values.contenders
    for name, config in contender_configs(ranks, names).items():
        trainer = build(ranks, name, config)
        run = TrainingRun(name, trainer, read_batches(trainer, 8))
        run.losses(5)
        text = measure(ranks, run, ranks.values.functions)
        if ranks.world.rank == 0:
            print(text, flush=True)
        trainer.close()
        del trainer, run
        collect_garbage(ranks.device)
    return 0


def add_options(parser: Parser) -> None:
    parser.add_argument("--contenders", nargs="+", default=["torchrec", "drop_in"], help="contenders of `bench step`")
    parser.add_argument("--functions", type=PositiveInt, help="list this many Python functions")


if __name__ == "__main__":
    sys.exit(run_on_ranks(["train"], str(__doc__), sys.argv[1:], work, add_options))
