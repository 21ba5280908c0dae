"""Where the time of a training step goes, from a trace of some steps on each rank, and what a captured step would take.

The ranks' program may be anything that torch.profiler can trace. Two sources are kept apart: the length of a step is
by the clock, without the profiler, which slows the CPU; the times of kernels are from the trace. Their difference is
the time in which the GPU waits for the CPU.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from dlrm_overlap.launching.text_table import count_of, format_table
from dlrm_overlap.observe.trace_summary import Span, exclusive, gpu_work, issued_work, length

# Collectives, by patterns for the names of NCCL's kernels. The first that matches counts.
_COLLECTIVES = {
    "all-reduce": r"(?i)all_?reduce",
    "reduce-scatter": r"(?i)reduce_?scatter",
    "all-gather": r"(?i)all_?gather",
    "all-to-all": r"(?i)all_?to_?all|SendRecv",
    "other communication": "",
}
_LOADS = "enumerate(DataLoader)"  # torch marks each wait for a batch so
_LOADER_DECIDES = 0.1  # of a step, in waits for the DataLoader


def step_parts(events: Sequence[dict[str, Any]], steps: int, step_ms: float) -> dict[str, float]:
    """Return the parts of a step, in ms, in the order of the report.

    Args:
        events: complete events of a trace of `steps` steps, as `trace_summary.read_events` returns.
        steps: how many steps were traced.
        step_ms: length of a step by the clock.

    Example: of one step of 10 ms with a product from 0 to 4 and NCCL's all-to-all from 3 to 6, the GPU is busy for 6,
    of which 4 compute and 2 are exposed all-to-all; it waits for the CPU for 4, and communicates for 3.
    """
    marked = [event for event in events if event.get("cat") == "user_annotation"]
    traced = [event for event in marked if event["name"].startswith("ProfilerStep#")]
    threads = {event["tid"] for event in traced}  # others may load batches beside the steps
    loads = [_span(event) for event in marked if event["name"].startswith(_LOADS) and event["tid"] in threads]
    work = gpu_work(issued_work(events))
    spans = {"step while traced": length(map(_span, traced))}
    if work:
        communicates = [(_collective(each.name), each.span) for each in work if each.communicates]
        parts = exclusive(
            {"  it computes": [each.span for each in work if each.computes]}
            | {f"  exposed {name}": own for name, own in _by_collective(communicates)}
            | {"  it only copies": [each.span for each in work if each.kind == "copies"]}
        )
        spans |= {"GPU busy": sum(parts.values()), **parts}
        spans["GPU waits for the CPU"] = max(0.0, step_ms * 1e3 * steps - spans["GPU busy"])
        spans["collectives, hidden or not"] = length(span for _, span in communicates)
    if loads:
        spans["CPU waits for the DataLoader"] = length(loads)
    return {"step": step_ms} | {name: us * 1e-3 / steps for name, us in spans.items()}


def _collective(name: str) -> str:
    return next(collective for collective, pattern in _COLLECTIVES.items() if re.search(pattern, name))


def _by_collective(spans: Iterable[tuple[str, Span]]) -> list[tuple[str, list[Span]]]:
    """Return each of `_COLLECTIVES` that is in `spans`, with its own."""
    found: dict[str, list[Span]] = {name: [] for name in _COLLECTIVES}
    for name, span in spans:
        found[name].append(span)
    return [(name, own) for name, own in found.items() if own]


def _span(event: dict[str, Any]) -> Span:
    return Span(event["ts"], event["ts"] + event["dur"])


@dataclass(frozen=True)
class RankProfile:
    """Where the time of a step goes on one rank."""

    rank: int
    world_size: int
    device: str
    """name of the GPU, or "cpu\""""
    steps: int
    """steps that were timed by the clock, and as many that were traced"""
    parts_ms: dict[str, float]
    """as `step_parts` returns"""
    tables: str | None = None
    """if the model is known: each table, as `explain` prints it"""


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes on all ranks; prints as a report."""

    ranks: tuple[RankProfile, ...]

    @property
    def captured_ms(self) -> tuple[float, float] | None:
        """What a captured step of the same kernels would take, at least and at most; None without times of a GPU.

        In both the GPU never waits for the CPU. At least: all communication is hidden, so the step takes as long as the
        computing kernels of the busiest rank, or the collectives. At most: as much is exposed as today. A collective
        contains the wait for a later rank, so it is taken from the rank on which it is shortest.
        """
        parts = [each.parts_ms for each in self.ranks]
        if not all("GPU busy" in each for each in parts):
            return None
        computes = max(each["  it computes"] for each in parts)
        return (
            max(computes, min(each["collectives, hidden or not"] for each in parts)),
            max(computes, min(each["GPU busy"] for each in parts)),
        )

    def __str__(self) -> str:
        """Return the parts of a step, the mean of the ranks and the most, and the estimate of a captured step."""
        first = min(self.ranks, key=lambda each: each.rank)
        lines = [["ms a step", "mean", "most", "on rank"]]
        for name in dict.fromkeys(name for each in self.ranks for name in each.parts_ms):
            of_ranks = [(each.parts_ms.get(name, 0.0), each.rank) for each in self.ranks]
            most, rank = max(of_ranks, key=lambda pair: pair[0])
            lines.append([name, f"{sum(ms for ms, _ in of_ranks) / len(of_ranks):.3f}", f"{most:.3f}", str(rank)])
        ranks = f"{len(self.ranks)} of {count_of(first.world_size, 'rank')}"
        text = [f"{count_of(first.steps, 'step')} by the clock and as many traced, {ranks}, {first.device}"]
        text += [
            format_table(lines),
            "",
            self._estimate(),
            *self._loader(),
            *(["", first.tables] if first.tables else []),
        ]
        return "\n".join(text)

    def _step_ms(self) -> float:
        return max(each.parts_ms["step"] for each in self.ranks)

    def _estimate(self) -> str:
        captured = self.captured_ms
        if captured is None:
            return "Nothing ran on a GPU, so its times are missing, and with them the estimate of a captured step."
        least, most = captured
        step = self._step_ms()
        return (
            "If the GPU never waited for the CPU, as in a captured step, these kernels would take an estimated\n"
            f"{least:.3f} ms with all communication hidden, {step / least:.1f} times as fast, or\n"
            f"{most:.3f} ms with as much exposed as now, {step / most:.1f} times as fast."
        )

    def _loader(self) -> list[str]:
        waits = max(each.parts_ms.get("CPU waits for the DataLoader", 0.0) for each in self.ranks)
        if waits < _LOADER_DECIDES * self._step_ms():
            return []
        return [f"The CPU waits {waits:.3f} ms a step for the DataLoader: no step is shorter than its loader takes."]
