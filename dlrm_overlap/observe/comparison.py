"""What several runs of one configuration show side by side: whether their losses agree, and what is faster.

Correct before fast: a backend whose losses part from the reference's gets no speedup. On GPUs the reference is not
deterministic: FBGEMM adds up the gradients of hot rows by atomics, in an order of chance, which training amplifies. So
further runs of it say by how much it parts from itself, which widens the tolerance (`observe.agreement`). All is read
from the files that the runs have written.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.observe.agreement import Losses, judge, loss_bound
from dlrm_overlap.observe.bootstrap import speedup_interval
from dlrm_overlap.observe.breakdown import PARTS
from dlrm_overlap.observe.comparison_board import CPU_NOTE, write_board
from dlrm_overlap.observe.result_files import nan_as_none, read_step_ms, read_summary, write_atomically

_RESULTS = ("train_loss", "eval_loss", "eval_auroc", "eval_ne", "samples_per_s", "step_ms_p50", "step_ms_p95")
_SHARED = ("world_size", "device", "global_batch_size", "versions")


def compare_runs(
    folders: Mapping[str, Path], rtol: float, noise_runs: int = 0, turn: int | None = None
) -> dict[str, Any]:
    """Return the contents of `comparison.json` for the runs in `folders`.

    Args:
        folders: run -> its folder. The first backend is the reference, and the `noise_runs` after it train it again.
        rtol: greatest relative difference of a logged training loss that agrees, where noise does not widen it.
        noise_runs: runs of the reference that measure by how much it parts from itself.
        turn: steps of a turn, if the backends took turns.
    """
    reference, *others = folders
    again, backends = others[:noise_runs], [reference, *others[noise_runs:]]
    # A run whose loss was not finite ended early and has no summary.
    summaries = {name: read_summary(folder) or {} for name, folder in folders.items()}
    shared = next((summary for summary in summaries.values() if summary), {})
    losses = {name: _read_losses(folder) for name, folder in folders.items()}
    reference_losses = [losses[name] for name in (reference, *again)]
    reference_ms = read_step_ms(folders[reference])
    results = {}
    for backend in backends:
        summary, verdict = summaries[backend], judge(losses[backend], reference_losses, rtol)
        closest = verdict.closest
        results[backend] = {
            **nan_as_none({key: summary.get(key) for key in _RESULTS}),
            "breakdown_ms": summary.get("breakdown_ms"),
            "speedup": None if verdict.fault else summaries[reference]["step_ms_p50"] / summary["step_ms_p50"],
            "speedup_interval": _interval(reference_ms, folders[backend], turn is not None)
            if backend != reference and verdict.fault is None
            else None,
            "max_relative_difference": verdict.max_difference,
            "max_relative_difference_step": verdict.max_difference_step,
            "closest_to_bound": closest and nan_as_none(dataclasses.asdict(closest) | {"share": closest.share}),
            "agree": verdict.fault is None,
            "fault": verdict.fault and f"{backend} against {reference}: {verdict.fault}",
        }
    return {
        "reference": reference,
        "rtol": rtol,
        "interleave": turn,
        "noise": _noise(reference_losses, again, summaries, rtol) if again else None,
        "agree": all(result["agree"] for result in results.values()),
        **{key: shared.get(key) for key in _SHARED},
        "backends": results,
    }


def _interval(reference_ms: Sequence[float], folder: Path, in_turns: bool) -> list[float] | None:
    interval = speedup_interval(reference_ms, read_step_ms(folder), in_turns)
    return list(interval) if interval else None


def _noise(
    reference_losses: Sequence[Losses], again: Sequence[str], summaries: Mapping[str, Mapping[str, Any]], rtol: float
) -> dict[str, Any]:
    """Return what the reference gave against itself: for each further run its difference from the first, its time."""
    runs = {}
    for name, losses in zip(again, reference_losses[1:], strict=True):
        verdict = judge(losses, reference_losses[:1], rtol)
        runs[name] = {
            "max_relative_difference": verdict.max_difference,
            "max_relative_difference_step": verdict.max_difference_step,
            "step_ms_p50": nan_as_none(summaries[name].get("step_ms_p50")),
        }
    return {"runs": runs, "bound": loss_bound(reference_losses, rtol)}


def _read_losses(folder: Path) -> dict[int, float]:
    """Return step -> logged training loss of a run; a loss that was not finite is NaN."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: math.nan if r["train/loss"] is None else r["train/loss"] for r in records if "train/loss" in r}


def format_comparison(comparison: Mapping[str, Any]) -> str:
    """Return a table with one line for each backend, at most 100 columns wide, and below it what more is known.

    That is the intervals of the speedups, and what a traced step is made of.
    """
    header = ["backend", "train loss", "AUROC", "samples/s", "step p50", "p95 (ms)", "speedup", "losses"]
    rows = [header]
    for backend, result in comparison["backends"].items():
        rows.append(
            [
                backend,
                _show(result["train_loss"], ".6f"),
                _show(result["eval_auroc"], ".4f"),
                _show(result["samples_per_s"], ".0f"),
                _show(result["step_ms_p50"], ".2f"),
                _show(result["step_ms_p95"], ".2f"),
                _show(result["speedup"], ".2f"),
                _verdict(result, comparison["noise"], backend == comparison["reference"]),
            ]
        )
    found = [(name, each["speedup_interval"]) for name, each in comparison["backends"].items()]
    intervals = ", ".join(f"{name} {each[0]:.3g} to {each[1]:.3g}" for name, each in found if each)
    noise = "within runs" if comparison["interleave"] is None else "of turns side by side"
    text = format_table(rows) + (f"\nspeedup, 95% of the noise {noise}: {intervals}" if intervals else "")
    parts = {name: each["breakdown_ms"] for name, each in comparison["backends"].items() if each["breakdown_ms"]}
    if not parts:
        return text
    lines = [[name, *(f"{found[part]:.3g}" for part in PARTS)] for name, found in parts.items()]
    return f"{text}\n{format_table([['ms a traced step', *PARTS], *lines])}"


def _verdict(result: Mapping[str, Any], noise: Mapping[str, Any] | None, is_reference: bool) -> str:
    if not result["agree"]:
        return "DISAGREE"
    difference = result["max_relative_difference"]
    if is_reference:
        return f"reference (noise {_short(_greatest_noise(noise))})" if noise else "reference"
    if noise and difference:
        closest = result["closest_to_bound"]
        return f"agree: {_short(closest['difference'])} within {_short(closest['bound'])}"
    return f"agree to {difference:.1e}" if difference else "identical"


def _greatest_noise(noise: Mapping[str, Any]) -> float:
    return max(run["max_relative_difference"] or 0.0 for run in noise["runs"].values())


def _short(value: float) -> str:
    """Return 3.1e-4 for 0.00031."""
    return format(value, ".1e").replace("e-0", "e-").replace("e+00", "")


def _show(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def report(
    folders: Mapping[str, Path],
    rtol: float,
    output: Path,
    noise_runs: int = 0,
    tensorboard: bool = False,
    turn: int | None = None,
    show: Callable[[str], None] = print,
) -> list[str]:
    """Write the comparison to `output`, show its table, and return a line for each backend that disagrees.

    Args:
        folders: see `compare_runs`, as for `rtol`, `noise_runs` and `turn`.
        output: JSON file; TensorBoard's part comes into the folder `comparison` beside it, and into the runs' folders.
        tensorboard: whether that is written.
        show: prints text.
    """
    comparison = compare_runs(folders, rtol, noise_runs, turn)
    write_atomically(output, json.dumps(comparison, indent=1) + "\n")
    if tensorboard:
        losses = {name: _read_losses(folder) for name, folder in folders.items()}
        write_board(output.parent / "comparison", folders, losses, comparison)
    show(format_comparison(comparison) + f"\n{CPU_NOTE}" * (comparison["device"] == "cpu"))
    return [result["fault"] for result in comparison["backends"].values() if result["fault"]]
