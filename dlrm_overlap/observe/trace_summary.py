"""Reads GPU traces: the time of each kind of work, and exposed communication.

Communication is exposed while a kernel moves data between GPUs or waits for a peer, and no kernel computes. A kernel
that looks up rows and also stores them to peers counts as computing for `exposed`, and as communicating for
`exposed_most`.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.config import InputError
from dlrm_overlap.launching.files import open_file
from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.observe.result_files import is_number

# Patterns for the names of FBGEMM's, NCCL's, cuBLAS's, PyTorch's and our kernels. The first match counts; a name
# without a match is dense.
_KINDS = {
    "lookup": r"split_embedding\w*_forward|_store_pooled|_put_slices|_put_pooled|_add_partials|_expand_rows",
    "exchange": r"^nccl(?!\w*AllReduce)|PtoP|_push_gradients|_put_columns|_store_rows|_signal_flags|_wait_for_flags"
    r"|_send_signal|_wait_message|_begin_call",
    "update": r"split_embedding\w*_backward|_update_rows|_mark_rows",
    "all-reduce": r"AllReduce|_average_share|_update_share",
    "ids": r"_pull_ids|_locate_ids|_divide_ids|_store_words|_count_bags|permute_\dD|bucketize|bounds_check|cumsum"
    r"|_fill_rows|^_(look_up|count|list|take|find|replace|claim|evict|insert|sight|halve)$",
    "sort": r"[Rr]adix|RunLength|ReduceByKey|DeviceScan|DeviceCompact|linearize"
    r"|_place_gradients|_cut_runs",
    "samples": r"_draw_\w+|_unpack_records",
    # In CUDA graphs, the first two are kernels with names such as memcpy128. The third copies lists of tensors.
    "copies": r"^[Mm]emcpy|^[Mm]emset|CopyFunctor|_swap_rows",
    "optimizer": r"multi_tensor_apply|_begin_update|_update_parameters",
    "products": r"gemm|gemv|nvjet|cutlass|cublas|splitKreduce|tile_product|_sum_parts",
}
KINDS = (*_KINDS, "dense")
_STORES = r"_store_pooled|_put_slices|_put_pooled"
_COMMUNICATES_TOO = r"_pull_ids"
_WAITS = r"^nccl|_wait_for_flags|_wait_message"
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_CALLS = ("cuda_runtime", "cuda_driver")


class Span(NamedTuple):
    begin: float
    end: float


class GpuWork(NamedTuple):
    name: str
    stream: int
    span: Span

    @property
    def kind(self) -> str:
        """One of `KINDS`; "dense" is pointwise work of the dense part."""
        return next((kind for kind, names in _KINDS.items() if re.search(names, self.name)), "dense")

    @property
    def stores(self) -> bool:
        return re.search(_STORES, self.name) is not None

    @property
    def communicates(self) -> bool:
        """True if the kernel only moves data between GPUs or waits for a peer."""
        return self.kind in ("exchange", "all-reduce") or re.search(_COMMUNICATES_TOO, self.name) is not None

    @property
    def waits(self) -> bool:
        """True if the kernel's time includes the wait for other ranks to begin."""
        return re.search(_WAITS, self.name) is not None


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a Chrome trace, possibly gzipped; an InputError if the file is not such a trace."""
    try:
        with open_file(path) as file, gzip.open(file) if path.suffix == ".gz" else nullcontext(file) as stream:
            events = [event for event in json.load(stream)["traceEvents"] if event.get("ph") == "X"]
        if not all(map(_is_valid, events)):
            raise ValueError
        return events
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        fault = getattr(error, "strerror", None) or "not a complete Chrome trace"
        raise InputError(f"{path}: {fault}; give a file that log.trace_steps wrote") from None


def _is_valid(event: dict[str, Any]) -> bool:
    is_work = event.get("cat") in _GPU_WORK
    return (
        is_number(event.get("ts", 0))
        and is_number(event.get("dur", 0))
        and isinstance(event.get("name", ""), str)
        and isinstance(event.get("args", {}), dict)
        and isinstance(event.get("args", {}).get("correlation"), int | None)
        and (not is_work or ({"name", "ts", "dur"} <= event.keys() and "stream" in event.get("args", {})))
        and (event.get("cat") != "user_annotation" or "name" in event)
    )


def gpu_work(events: Iterable[dict[str, Any]]) -> list[GpuWork]:
    return [
        GpuWork(event["name"], event["args"]["stream"], Span(event["ts"], event["ts"] + event["dur"]))
        for event in events
        if event.get("cat") in _GPU_WORK
    ]


def length(spans: Iterable[Span]) -> float:
    return exclusive({"": spans})[""]


def union(spans: Iterable[Span], window: Span) -> list[Span]:
    found: list[Span] = []
    for span in sorted(spans):
        begin, end = max(span.begin, window.begin), min(span.end, window.end)
        if begin >= end:
            continue
        if found and begin <= found[-1].end:
            found[-1] = Span(found[-1].begin, max(found[-1].end, end))
        else:
            found.append(Span(begin, end))
    return found


def spans_by_kind(work: Iterable[GpuWork]) -> dict[str, list[Span]]:
    """Return when each of `KINDS` ran; a kind that never ran has no span."""
    found: dict[str, list[Span]] = {kind: [] for kind in KINDS}
    for each in work:
        found[each.kind].append(each.span)
    return found


def exclusive(groups: Mapping[str, Iterable[Span]]) -> dict[str, float]:
    """Return, for each group, the us in which it runs and no group before it in `groups` does.

    Example: products from 0 to 6, an exchange from 4 to 8, and a step from 0 to 10, in this order, give 6, 2 and 2.
    """
    changes = [
        (time, group, change)
        for group, spans in enumerate(groups.values())
        for span in spans
        for time, change in zip(span, (1, -1), strict=True)
    ]
    running, found, since = [0] * len(groups), [0.0] * len(groups), 0.0
    for time, group, change in sorted(changes):
        first = next((number for number, count in enumerate(running) if count), None)
        if first is not None:
            found[first] += time - since
        running[group] += change
        since = time
    return dict(zip(groups, found, strict=True))


def shares(work: Sequence[GpuWork], window: Span | None = None) -> dict[str, float]:
    """Return the us of compute, exposed, copying, idle and exposed_most in `window`, by default the time of all `work`.

    The first four are exclusive: an instant counts for the first that applies. Copies are within this GPU or from the
    CPU. For `exposed_most`, see the module.
    """
    window = window or Span(min(each.span.begin for each in work), max(each.span.end for each in work))
    groups = {name: list[Span]() for name in ("compute", "stores", "exposed", "copying")}
    for each in work:
        span = Span(max(each.span.begin, window.begin), min(each.span.end, window.end))
        if span.begin < span.end:
            busy = "stores" if each.stores else "exposed" if each.communicates else "compute"
            groups["copying" if each.kind == "copies" else busy].append(span)
    stores = groups.pop("stores")
    most = exclusive({"compute": groups["compute"], "exposed": groups["exposed"] + stores})["exposed"]
    groups["compute"] += stores
    return exclusive({**groups, "idle": [window]}) | {"exposed_most": most}


def without_waits(ranks: Sequence[Sequence[GpuWork]]) -> list[list[GpuWork]]:
    """Return each rank's work as if no rank waited for another to begin a collective.

    A kernel that waits keeps its end, and gets the duration that it has on the rank where it is shortest. The k-th
    kernel of a name to begin is the same collective on all ranks; names that ranks ran unequally often are unchanged.
    """
    by_name: list[dict[str, list[GpuWork]]] = []
    for work in ranks:
        by_name.append({})
        for each in sorted(work, key=lambda each: each.span):
            if each.waits:
                by_name[-1].setdefault(each.name, []).append(each)
    shortest = {
        name: [
            min(us) for us in zip(*([span.end - span.begin for *_, span in of[name]] for of in by_name), strict=True)
        ]
        for name, found in by_name[0].items()
        if all(len(of.get(name, [])) == len(found) for of in by_name)
    }
    shortened = []
    for work, of in zip(ranks, by_name, strict=True):
        others = [each for each in work if each.name not in shortest]
        for name, least in shortest.items():
            pairs = zip(of[name], least, strict=True)
            others += [each._replace(span=Span(each.span.end - us, each.span.end)) for each, us in pairs]
        shortened.append(others)
    return shortened


def issued_work(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `events` without GPU work issued before the trace began; all events if the trace has no CPU calls."""
    calls = {_call(event) for event in events if event.get("cat") in _HOST_CALLS} - {None}
    return [event for event in events if event.get("cat") not in _GPU_WORK or not calls or _call(event) in calls]


def _call(event: dict[str, Any]) -> int | None:
    return event.get("args", {}).get("correlation")


def summarise(path: Path) -> str:
    """Return a table of the kinds of work: ms per step, and ms in which nothing else runs."""
    events = read_events(path)
    work = gpu_work(issued_work(events))
    if not any(each.span.end > each.span.begin for each in work):
        raise InputError(f"{path}: nothing in it ran on a GPU; open a CPU trace in ui.perfetto.dev")
    marks = [event for event in events if event.get("cat") == "user_annotation" and "ProfilerStep#" in event["name"]]
    steps = max(1, len(marks))
    ms, found = 1e-3 / steps, shares(work)
    length_us = sum(found.values()) - found["exposed_most"]
    lines = [["work", "ms a step", "alone"]]
    by_kind = spans_by_kind(work)
    for kind, spans in by_kind.items():
        if spans:
            others = [span for other in by_kind if other != kind for span in by_kind[other]]
            alone = exclusive({"others": others, "alone": spans})["alone"]
            lines.append([kind, f"{length(spans) * ms:.3f}", f"{alone * ms:.3f}"])
    text = (
        f"{steps} step{'s' * (steps > 1)} of {length_us * ms:.3f} ms, the GPU idle in {found['idle'] * ms:.3f} of them"
    )
    exposed = f"exposed communication: {found['exposed'] * ms:.3f} ms a step, {found['exposed'] / length_us:.1%}"
    if any(each.stores for each in work):
        most = f"{found['exposed_most'] * ms:.3f} ms, {found['exposed_most'] / length_us:.1%}"
        exposed += f"; at most {most}, if kernels that look up and store count as communication"
    return f"{path}: {text}\n{format_table(lines)}\n{exposed}"
