"""Sums up a GPU's trace: the time of each kind of work, how much of it ran alone, and exposed communication.

Communication is hidden where other work runs at the same time. It is exposed where a kernel runs that moves data
between GPUs or waits for a peer, and none that computes. A kernel that both looks up rows and stores them to peers
computes as long as it runs, since it reads rows to its end; a trace cannot show which of its time is the links' alone.
So there are two numbers: `exposed` takes such a kernel for computing, `exposed_most` for communication.

Holistic Trace Analysis finds communication by the names of NCCL's kernels, so it takes ours for computing; and it
installs JupyterLab.
"""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.text_table import format_table

# Kinds of work, by patterns for the names of FBGEMM's, NCCL's, cuBLAS's, PyTorch's and our kernels. The first that
# matches counts; a name that none matches is dense.
_KINDS = {
    "lookup": r"split_embedding\w*_forward|_store_pooled|_put_slices",
    "exchange": r"^nccl(?!\w*AllReduce)|_push_gradients|_raise_flags|_await_flags|_store_to_peers|PtoP"
    r"|_begin_call",
    "update": r"split_embedding\w*_backward|_update_rows|_add_to_rows",
    "all-reduce": r"AllReduce|_average_share",
    "ids": r"_pull_ids|_place_ids|permute_\dD|bucketize|bounds_check|cumsum",
    "sort": r"[Rr]adix|RunLength|ReduceByKey|DeviceScan|DeviceCompact|linearize"
    r"|_place_gradients|_cut_runs",
    "samples": r"_draw_\w+",
    # In CUDA graphs the first two are kernels, named memcpy128 and the like.
    "copies": r"^[Mm]emcpy|^[Mm]emset",
    "optimizer": r"multi_tensor_apply|_begin_update|_update_parameters",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|splitKreduce|product_(?:on_hopper|in_triton)",
}
KINDS = (*_KINDS, "dense")
_PUTS = r"_store_pooled|_put_slices"
_COMMUNICATES_TOO = r"_pull_ids"
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_CALLS = ("cuda_runtime", "cuda_driver")


class Span(NamedTuple):
    """A stretch of time, in us."""

    begin: float
    end: float


class Work(NamedTuple):
    """A kernel or a copy on the GPU."""

    name: str
    stream: int
    span: Span

    @property
    def kind(self) -> str:
        """The kind of work, one of `KINDS`; dense is the dense part's pointwise work."""
        return next((kind for kind, names in _KINDS.items() if re.search(names, self.name)), "dense")

    @property
    def puts(self) -> bool:
        """Whether it looks up rows and puts them to peers at once."""
        return re.search(_PUTS, self.name) is not None

    @property
    def communicates(self) -> bool:
        """Whether it moves data between GPUs, or waits for a peer, and does nothing else."""
        return self.kind in ("exchange", "all-reduce") or re.search(_COMMUNICATES_TOO, self.name) is not None

    @property
    def computes(self) -> bool:
        """Whether it is neither communication nor a copy within this GPU or from the host."""
        return not self.communicates and self.kind != "copies"


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a Chrome trace, gzipped or not.

    Raises:
        InputError: if the file cannot be read as one.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    except (EOFError, zlib.error):
        raise InputError(f"{path}: ends early or is damaged; copy it again, or trace the steps again") from None
    except (gzip.BadGzipFile, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{path}: not a Chrome trace; give a file that log.trace_steps has written") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a file that log.trace_steps has written") from None


def gpu_work(events: Iterable[dict[str, Any]]) -> list[Work]:
    """Return the kernels and copies among `events` that ran on the GPU."""
    return [
        Work(event["name"], event["args"]["stream"], Span(event["ts"], event["ts"] + event["dur"]))
        for event in events
        if event.get("cat") in _GPU_WORK
    ]


def merge(spans: Iterable[Span]) -> list[Span]:
    """Return disjoint stretches that cover the same time, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.begin <= merged[-1].end:
            merged[-1] = Span(merged[-1].begin, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def length(spans: Iterable[Span]) -> float:
    """Return the time that any of `spans` covers, in us."""
    return sum(end - begin for begin, end in merge(spans))


def subtract(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """Return, in order, the stretches that `spans` cover and `others` do not.

    Example: 0 .. 10 less 2 .. 3 and 8 .. 20 leaves 0 .. 2 and 3 .. 8.
    """
    changes = [(time, change, 0) for span in spans for time, change in zip(span, (1, -1), strict=True)]
    changes += [(time, 0, change) for span in others for time, change in zip(span, (1, -1), strict=True)]
    left: list[Span] = []
    inside, covered, since = 0, 0, 0.0
    for time, of_spans, of_others in sorted(changes):
        if inside and not covered and since < time:
            left.append(Span(since, time))
        inside, covered, since = inside + of_spans, covered + of_others, time
    return merge(left)


@dataclass(frozen=True)
class Shares:
    """A GPU's work in a stretch of time, in us. `compute`, `exposed`, `copying` and `idle` add up to its length."""

    length: float
    compute: float
    """a kernel ran that computes"""
    exposed: float
    """a kernel ran that communicates, and none that computes"""
    exposed_most: float
    """the same, kernels that look up and put at once taken for communication"""
    copying: float
    """nothing but copies ran, within this GPU or from the host"""
    idle: float
    """nothing ran"""


def share(work: Sequence[Work], window: Span) -> Shares:
    """Return the shares of `window`, of whose work `work` holds at least that part."""
    compute = [each.span for each in work if each.computes]
    most = subtract(
        [each.span for each in work if each.communicates or each.puts],
        [each.span for each in work if each.computes and not each.puts],
    )
    busy = [each.span for each in work]

    def within(spans: Iterable[Span]) -> float:
        return sum(max(0.0, min(end, window.end) - max(begin, window.begin)) for begin, end in spans)

    exposed = exposed_spans(work)
    copying = subtract([each.span for each in work if each.kind == "copies"], [*compute, *exposed])
    return Shares(
        window.end - window.begin,
        within(merge(compute)),
        within(exposed),
        within(most),
        within(copying),
        within(subtract([window], busy)),
    )


def exposed_spans(work: Sequence[Work]) -> list[Span]:
    """Return, in order, the stretches in which a kernel runs that communicates and none that computes."""
    return subtract([each.span for each in work if each.communicates], [each.span for each in work if each.computes])


def spans_by_kind(work: Iterable[Work]) -> dict[str, list[Span]]:
    """Return the spans of each of `KINDS`, in its order."""
    by_kind: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for each in work:
        by_kind[each.kind].append(each.span)
    return by_kind


def read_steps(path: Path) -> tuple[list[Work], int]:
    """Return the work of the training steps in a trace, none if no GPU was traced, and their number, 1 at least.

    A CPU that is ahead issued the step before while nothing was traced yet, and the GPU runs it when something is. Work
    that no call in the trace has issued belongs to none of these steps.

    Raises:
        InputError: if the file is not a trace.
    """
    events = read_events(path)
    try:
        work = gpu_work(issued_work(events))
    except LookupError as error:
        raise InputError(f"{path}: work without {error}; give a file that log.trace_steps has written") from None
    marks = [event for event in events if event.get("cat") == "user_annotation" and "ProfilerStep#" in event["name"]]
    return work, max(1, len(marks))


def issued_work(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `events` without the work that none of them has issued; all where the host's calls are not among them."""
    calls = {_call(event) for event in events if event.get("cat") in _HOST_CALLS} - {None}
    return [event for event in events if event.get("cat") not in _GPU_WORK or not calls or _call(event) in calls]


def _call(event: dict[str, Any]) -> int | None:
    """Return the number that a call of the host and the work it has issued have in common."""
    args = event.get("args")
    number = args.get("correlation") if isinstance(args, dict) else None
    return number if isinstance(number, int) else None


def summarise(path: Path) -> str:
    """Return a table of the kinds of work in a trace of training steps: ms a step, and ms of these it runs alone.

    Raises:
        InputError: if the file is not a trace, or nothing in it ran on a GPU.
    """
    work, steps = read_steps(path)
    if not work:
        raise InputError(f"{path}: nothing in it ran on a GPU; open a CPU's trace in ui.perfetto.dev")
    ms = 1e-3 / steps
    by_kind = spans_by_kind(work)
    merged = merge(each.span for each in work)
    whole, busy = merged[-1].end - merged[0].begin, length(merged)
    lines = [["work", "ms a step", "alone"]]
    for kind, spans in by_kind.items():
        if spans:
            others = itertools.chain.from_iterable(by_kind[other] for other in by_kind if other != kind)
            lines.append([kind, f"{length(spans) * ms:.3f}", f"{(busy - length(others)) * ms:.3f}"])
    text = f"{steps} step{'s' * (steps > 1)} of {whole * ms:.3f} ms, the GPU idle in {(whole - busy) * ms:.3f} of them"
    shares = share(work, Span(merged[0].begin, merged[-1].end))
    exposed = f"exposed communication: {shares.exposed * ms:.3f} ms a step, {shares.exposed / whole:.1%}"
    if any(each.puts for each in work):
        most = f"{shares.exposed_most * ms:.3f} ms, {shares.exposed_most / whole:.1%}"
        exposed += f"; at most {most}, if kernels that look up and put do nothing but put"
    return f"{path}: {text}\n{format_table(lines)}\n{exposed}"
