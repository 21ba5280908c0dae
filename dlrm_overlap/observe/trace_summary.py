"""Reads traces of a GPU: the time of each kind of work, the parts of a step, and exposed communication.

Communication is hidden where other work runs at the same time. It is exposed where a kernel runs that moves data
between GPUs or waits for a peer, and none that computes. A kernel that both looks up rows and stores them to peers
computes as long as it runs, since it reads rows to its end; a trace cannot show which of its time is the links' alone.
So there are two numbers: `exposed` takes such a kernel for computing, `exposed_most` for communication.

Holistic Trace Analysis finds communication by the names of NCCL's kernels, so it takes ours for computing; and it
installs JupyterLab.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.text_table import format_table

# Kinds of work, by patterns for the names of FBGEMM's, NCCL's, cuBLAS's, PyTorch's and our kernels. The first that
# matches counts; a name that none matches is dense.
_KINDS = {
    "lookup": r"split_embedding\w*_forward|_store_pooled|_put_slices|_expand_rows",
    "exchange": r"^nccl(?!\w*AllReduce)|_push_gradients|_raise_flags|_await_flags|_store_to_peers|PtoP"
    r"|_begin_call",
    "update": r"split_embedding\w*_backward|_update_rows",
    "all-reduce": r"AllReduce|_average_share",
    "ids": r"_pull_ids|_place_ids|permute_\dD|bucketize|bounds_check|cumsum",
    "sort": r"[Rr]adix|RunLength|ReduceByKey|DeviceScan|DeviceCompact|linearize"
    r"|_place_gradients|_cut_runs",
    "samples": r"_draw_\w+",
    # In CUDA graphs the first two are kernels, named memcpy128 and the like. The third copies a list of tensors.
    "copies": r"^[Mm]emcpy|^[Mm]emset|CopyFunctor",
    "optimizer": r"multi_tensor_apply|_begin_update|_update_parameters",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|splitKreduce|tile_product",
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
    except OSError as error:
        fault = error.strerror or "not gzipped"
    except (EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError):
        fault = "not a whole Chrome trace"
    raise InputError(f"{path}: {fault}; give a file that log.trace_steps has written")


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


def exclusive(groups: Mapping[str, Iterable[Span]]) -> dict[str, float]:
    """Return the us of each group in which none of the groups before it runs: each instant counts once.

    Example: products from 0 to 6, an exchange from 4 to 8, and a step from 0 to 10: 6, 2 and 2.
    """
    found: dict[str, float] = {}
    before: list[Span] = []
    for name, spans in groups.items():
        own = list(spans)
        found[name] = length(subtract(own, before))
        before += own
    return found


def shares(work: Iterable[Work], window: Span) -> dict[str, float]:
    """Return the shares of `window`, in us: compute, exposed, exposed_most, copying, idle.

    A kernel ran that computes; else one that communicates; else copies, within this GPU or from the host; else nothing:
    these four add up to its length. `exposed_most` takes kernels that look up and put at once for communication.
    """
    spans = [(each, Span(max(each.span.begin, window.begin), min(each.span.end, window.end))) for each in work]
    inside = [each._replace(span=span) for each, span in spans if span.begin < span.end]
    compute = [each.span for each in inside if each.computes]
    communication = [each.span for each in inside if each.communicates]
    puts = [each.span for each in inside if each.puts]
    most = {"alone": [each.span for each in inside if each.computes and not each.puts], "most": communication + puts}
    copies = [each.span for each in inside if each.kind == "copies"]
    parts = exclusive({"compute": compute, "exposed": communication, "copying": copies, "idle": [window]})
    return parts | {"exposed_most": exclusive(most)["most"]}


def issued_work(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `events` without the work that none of them has issued; all where the host's calls are not among them.

    A CPU that is ahead issued the step before while nothing was traced yet, and the GPU runs it when something is.
    """
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
    events = read_events(path)
    try:
        work = gpu_work(issued_work(events))
    except LookupError as error:
        raise InputError(f"{path}: work without {error}; give a file that log.trace_steps has written") from None
    if not work:
        raise InputError(f"{path}: nothing in it ran on a GPU; open a CPU's trace in ui.perfetto.dev")
    marks = [event for event in events if event.get("cat") == "user_annotation" and "ProfilerStep#" in event["name"]]
    steps = max(1, len(marks))
    ms, window = 1e-3 / steps, Span(min(each.span.begin for each in work), max(each.span.end for each in work))
    length_us, found = window.end - window.begin, shares(work, window)
    lines = [["work", "ms a step", "alone"]]
    for kind in KINDS:
        if spans := [each.span for each in work if each.kind == kind]:
            alone = exclusive({"others": [each.span for each in work if each.kind != kind], "alone": spans})["alone"]
            lines.append([kind, f"{length(spans) * ms:.3f}", f"{alone * ms:.3f}"])
    text = (
        f"{steps} step{'s' * (steps > 1)} of {length_us * ms:.3f} ms, the GPU idle in {found['idle'] * ms:.3f} of them"
    )
    exposed = f"exposed communication: {found['exposed'] * ms:.3f} ms a step, {found['exposed'] / length_us:.1%}"
    if any(each.puts for each in work):
        most = f"{found['exposed_most'] * ms:.3f} ms, {found['exposed_most'] / length_us:.1%}"
        exposed += f"; at most {most}, if kernels that look up and put do nothing but put"
    return f"{path}: {text}\n{format_table(lines)}\n{exposed}"
