"""Where the CPU's time of an eager step goes, part by part, for contenders of `bench step`.

    torchrun --nproc-per-node 2 -m tests.gpu.host_time --config configs/bench/step_mlperf.yaml

Parts are the stages of TorchRec's pipeline and, within them, those of the sharded module and of our exchange. For each
it prints, per step on rank 0: calls, `ms`, `own_ms` without the parts inside it, and `cpu_ms`, the share of `own_ms` in
which the thread ran. Then follow, from a trace of other steps, operators, launches, copies and fills, waits for the GPU
and their ms; and the lines of Python at which samples of the main thread found it most often.
"""

import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionAwaitable, ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.runtime_forwards import PipelinedForward
from torchrec.optim.keyed import KeyedOptimizerWrapper

from dlrm_overlap.bench.figures.step import build, contender_configs
from dlrm_overlap.bench.harness.training_runs import TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import collect_garbage
from dlrm_overlap.embedding.backends.ids import IdExchange
from dlrm_overlap.embedding.capacity import PendingResult
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.sharded_module import OverlapShardedEmbeddingBagCollection
from dlrm_overlap.embedding.window_input_dist import WindowInputDist
from dlrm_overlap.launching.parsing import Parser
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.observe.trace_summary import read_events
from dlrm_overlap.train.model import BottomMLP, Head, Loss
from dlrm_overlap.train.ranks import Ranks, run_on_ranks

_STEPS, _TRACED, _SAMPLED, _PREFIX = 20, 5, 60, "part "
_LINES = 24  # of samples
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
    DistributedDataParallel: ("forward",),
    WindowInputDist: ("request", "send"),
    PendingResult: ("wait",),
    IdExchange: ("send",),
    KeyedOptimizerWrapper: ("step",),
    EmbeddingFusedOptimizer: ("step", "zero_grad"),
}  # fmt: skip
_LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
_COPIES = ("cudaMemcpyAsync", "cudaMemsetAsync", "cudaMemcpy", "cudaMemset")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")


class Parts:
    """Times of parts; parts nest within a thread."""

    def __init__(self) -> None:
        self.ms = defaultdict[str, float](float)
        self.own_ms = defaultdict[str, float](float)
        self.cpu_ms = defaultdict[str, float](float)
        self.calls = defaultdict[str, int](int)
        self._inside = threading.local()
        self.traces = False

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.traces:
                with record_function(_PREFIX + name):
                    return function(*args, **kwargs)
            inside: list[tuple[float, float]] = vars(self._inside).setdefault("stack", [])
            inside.append((0.0, 0.0))
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                ms, cpu_ms = (time.perf_counter() - began) * 1e3, (time.thread_time() - cpu_began) * 1e3
                others, others_cpu = inside.pop()
                self.ms[name] += ms
                self.own_ms[name] += ms - others
                self.cpu_ms[name] += cpu_ms - others_cpu
                self.calls[name] += 1
                if inside:
                    inside[-1] = inside[-1][0] + ms, inside[-1][1] + cpu_ms

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


def measure(run: TrainingRun) -> Iterator[str]:
    """Yield the tables of a contender, one after the other."""
    step_ms, host_ms = map(statistics.median, run.time(4 * _STEPS))
    yield f"{run.name}: {step_ms:.2f} ms a step, {host_ms:.2f} ms of it in progress()"
    parts = Parts()
    with parts.of(run.trainer):
        began, cpu_began = time.perf_counter(), time.process_time()
        steps = _counted(lambda: run.time(_STEPS))
        wall_ms, cpu_ms = (time.perf_counter() - began) * 1e3, (time.process_time() - cpu_began) * 1e3
        yield f"{wall_ms / steps:.2f} ms a step with its warm-up, {cpu_ms / steps:.2f} ms of CPU time of all threads"
        yield _table(parts, steps)
        parts.traces = True
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            steps = _counted(lambda: run.time(_TRACED))
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(path := f"{folder}/trace.json")
        yield _counts(read_events(Path(path)), steps)
    yield _sampled(run)


def _table(parts: Parts, steps: int) -> str:
    lines = [["part", "calls", "ms", "own_ms", "cpu_ms"]]
    for name in sorted(parts.ms, key=lambda name: -parts.own_ms[name]):
        numbers = parts.calls[name], parts.ms[name], parts.own_ms[name], parts.cpu_ms[name]
        lines.append([name, *(f"{each / steps:.3g}" for each in numbers)])
    return format_table(lines)


def _counts(events: list[dict[str, Any]], steps: int) -> str:
    counts, columns = count_calls(events), ("ops", "launches", "copies", "waits", "waits_ms")
    counts["(all)"] = {name: sum(each[name] for each in counts.values()) for name in columns}
    lines = [["part", *columns]]
    for name, found in sorted(counts.items(), key=lambda item: -item[1]["launches"]):
        lines.append([name, *(f"{found[each] / steps:.3g}" for each in columns)])
    return format_table(lines)


def _sampled(run: TrainingRun) -> str:
    """Return where the main thread is, as another thread sees it while it holds the GIL."""
    main, found, ends = threading.get_ident(), Counter[str](), threading.Event()

    def sample() -> None:
        while not ends.wait(2e-4):
            frame = sys._current_frames().get(main)
            names = list[str]()
            while frame is not None and len(names) < 2:
                code = frame.f_code
                names.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
                frame = frame.f_back
            found[" < ".join(names)] += 1

    thread, interval = threading.Thread(target=sample, daemon=True), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    began = time.perf_counter()
    thread.start()
    steps = _counted(lambda: run.time(_SAMPLED))
    ends.set()
    thread.join()
    sys.setswitchinterval(interval)
    ms = (time.perf_counter() - began) * 1e3 / steps / max(1, found.total())
    lines = [["ms", "line < its caller"], *([f"{count * ms:.3f}", where] for where, count in found.most_common(_LINES))]
    return format_table(lines)


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


def work(ranks: Ranks) -> int:
    names = ranks.values.contenders
    for name, config in contender_configs(ranks, names).items():
        trainer = build(ranks, name, config)
        run = TrainingRun(name, trainer, read_batches(trainer, 8))
        run.losses(5)
        try:
            for text in measure(run):
                if ranks.world.rank == 0:
                    print(text, flush=True)
        except Exception:  # the other tables and contenders are worth having
            traceback.print_exc()
        trainer.close()
        del trainer, run
        collect_garbage(ranks.device)
    return 0


def add_options(parser: Parser) -> None:
    parser.add_argument("--contenders", nargs="+", default=["torchrec", "drop_in"], help="contenders of `bench step`")


if __name__ == "__main__":
    sys.exit(run_on_ranks(["train"], str(__doc__), sys.argv[1:], work, add_options))
