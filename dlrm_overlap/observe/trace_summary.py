"""Sums up a GPU's trace: the time of each kind of work, and how much of that time the kind ran alone.

Communication is hidden where other work runs at the same time; what runs alone is exposed.
"""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from dlrm_overlap.config import InputError
from dlrm_overlap.observe.text_table import format_table

# Kinds of work, by patterns for the names of FBGEMM's, NCCL's and our kernels. The first that matches counts; what none
# matches is dense.
_KINDS = {
    "lookup": r"split_embedding\w*_forward|_store_pooled|_put_slices",
    "exchange": r"^nccl(?!\w*AllReduce)|_push_gradients|_raise_flags|_await_flags",
    "update": r"split_embedding\w*_backward|_update_rows|_add_to_rows",
    "all-reduce": r"AllReduce|_average_share|_send_shares",
    "ids": r"[Rr]adix|RunLength|DeviceScan|cumsum|linearize|permute_\dD|bucketize|bounds_check"
    r"|_place_gradients|_find_ranges|_cut_runs",
    "copies": r"^Memcpy|^Memset",
}
_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


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
        """The kind of work: lookup, exchange, update, all-reduce, ids, copies or dense."""
        return next((kind for kind, names in _KINDS.items() if re.search(names, self.name)), "dense")


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the complete events of a Chrome trace, gzipped or not.

    Raises:
        InputError: if the file cannot be read as one.
    """
    try:
        data = path.read_bytes()
        events = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
        return [event for event in events if event.get("ph") == "X"]
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


def summarise(path: Path) -> str:
    """Return a table of the kinds of work in a trace of training steps: ms a step, and ms of these it runs alone.

    Raises:
        InputError: if the file is not a trace, or nothing in it ran on a GPU.
    """
    events = read_events(path)
    try:
        work = gpu_work(events)
    except LookupError as error:
        raise InputError(f"{path}: work without {error}; give a file that log.trace_steps has written") from None
    if not work:
        raise InputError(f"{path}: nothing in it ran on a GPU; open a CPU's trace in ui.perfetto.dev")
    marks = [event for event in events if event.get("cat") == "user_annotation" and "ProfilerStep#" in event["name"]]
    steps = max(1, len(marks))
    ms = 1e-3 / steps
    by_kind: dict[str, list[Span]] = {kind: [] for kind in (*_KINDS, "dense")}
    for each in work:
        by_kind[each.kind].append(each.span)
    merged = merge(each.span for each in work)
    whole, busy = merged[-1].end - merged[0].begin, length(merged)
    lines = [["work", "ms a step", "alone"]]
    for kind, spans in by_kind.items():
        if spans:
            others = itertools.chain.from_iterable(by_kind[other] for other in by_kind if other != kind)
            lines.append([kind, f"{length(spans) * ms:.3f}", f"{(busy - length(others)) * ms:.3f}"])
    text = f"{steps} step{'s' * (steps > 1)} of {whole * ms:.3f} ms, the GPU idle in {(whole - busy) * ms:.3f} of them"
    return f"{path}: {text}\n{format_table(lines)}"
