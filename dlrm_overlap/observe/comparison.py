"""Several runs of one configuration side by side: whether their losses agree, and which is faster.

Correct before fast: a backend whose losses part from the reference's gets no speedup. On GPUs the reference is not
deterministic: FBGEMM adds up the gradients of hot rows by atomics, in an order of chance, which training amplifies. So
further runs of it say by how much it parts from itself, which widens the tolerance (`observe.agreement`). All is read
from the files that the runs have written.
"""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.observe.agreement import find_fault, greatest_difference, loss_bound
from dlrm_overlap.observe.result_files import nan_as_none, read_summary, write_atomically

_RESULTS = ("train_loss", "eval_loss", "eval_auroc", "eval_ne", "samples_per_s", "step_ms_p50", "step_ms_p95")
_SHARED = ("world_size", "device", "global_batch_size", "versions")
_CPU_NOTE = "On CPUs plain PyTorch stands in for the kernels of pgas and fused: take speedups from GPUs."


def compare_runs(folders: Mapping[str, Path], rtol: float, noise_runs: int = 0) -> dict[str, Any]:
    """Return the contents of `comparison.json` for the runs in `folders`.

    Args:
        folders: run -> its folder. The first backend is the reference, and the `noise_runs` after it train it again.
        rtol: greatest relative difference of a logged training loss that agrees, where noise does not widen it.
        noise_runs: runs of the reference that measure by how much it parts from itself.
    """
    reference, *others = folders
    again, backends = others[:noise_runs], [reference, *others[noise_runs:]]
    # A run whose loss was not finite ended early and has no summary.
    summaries = {name: read_summary(folder) or {} for name, folder in folders.items()}
    shared = next((summary for summary in summaries.values() if summary), {})
    losses = {name: _read_losses(folder) for name, folder in folders.items()}
    first, of_again = losses[reference], [losses[name] for name in again]
    results = {}
    for backend in backends:
        summary, fault = summaries[backend], find_fault(losses[backend], first, of_again, rtol)
        results[backend] = {
            **nan_as_none({key: summary.get(key) for key in _RESULTS}),
            "speedup": None if fault else summaries[reference]["step_ms_p50"] / summary["step_ms_p50"],
            "max_relative_difference": greatest_difference(losses[backend], first),
            "agree": fault is None,
            "fault": fault and f"{backend} against {reference}: {fault}",
        }
    runs = {
        name: {
            "max_relative_difference": greatest_difference(losses[name], first),
            "step_ms_p50": nan_as_none(summaries[name].get("step_ms_p50")),
        }
        for name in again
    }
    return {
        "reference": reference,
        "rtol": rtol,
        "noise": {"runs": runs, "bound": nan_as_none(loss_bound(first, of_again, rtol))} if again else None,
        "agree": all(result["agree"] for result in results.values()),
        **{key: shared.get(key) for key in _SHARED},
        "backends": results,
    }


def _read_losses(folder: Path) -> dict[int, float]:
    """Return step -> logged training loss of a run; a loss that was not finite is NaN."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: math.nan if r["train/loss"] is None else r["train/loss"] for r in records if "train/loss" in r}


def comparison_rows(comparison: Mapping[str, Any]) -> list[list[str]]:
    """Return a table of text: a header, a line a backend, and, last, one for each further run of the reference.

    The ratios of these show how far two runs of the same thing are apart.
    """
    rows = [["backend", "train loss", "AUROC", "samples/s", "p50, ms", "p95, ms", "speedup", "losses"]]
    noise, reference = comparison["noise"], comparison["backends"][comparison["reference"]]
    for backend, result in comparison["backends"].items():
        rows.append(
            [
                backend,
                _show(result["train_loss"], ".6f"),
                _show(result["eval_auroc"], ".4f"),
                _show(result["samples_per_s"], ".0f"),
                _show(result["step_ms_p50"]),
                _show(result["step_ms_p95"]),
                _show(result["speedup"], ".2f"),
                _verdict(result, noise, backend == comparison["reference"]),
            ]
        )
    for name, run in noise["runs"].items() if noise else ():
        own_ms, known = run["step_ms_p50"], reference["step_ms_p50"] and run["step_ms_p50"]
        ratio = _show(reference["step_ms_p50"] / own_ms if known else None, ".2f")
        rows.append([name, "-", "-", "-", _show(own_ms), "-", ratio, "reference again"])
    return rows


def _verdict(result: Mapping[str, Any], noise: Mapping[str, Any] | None, is_reference: bool) -> str:
    if not result["agree"]:
        return "DISAGREE"
    difference = result["max_relative_difference"]
    if is_reference:
        if not noise:
            return "reference"
        greatest = max(run["max_relative_difference"] or 0.0 for run in noise["runs"].values())
        return f"reference (noise {greatest:.1e})"
    return f"agree to {difference:.1e}" if difference else "identical"


def _show(value: float | None, spec: str = ".4g") -> str:
    return "-" if value is None else format(value, spec)


def report(
    folders: Mapping[str, Path],
    rtol: float,
    output: Path,
    noise_runs: int = 0,
    show: Callable[[str], None] = print,
) -> list[str]:
    """Write the comparison to the JSON file `output`, show its table, and return a line for each that disagrees.

    The other arguments are those of `compare_runs`; `show` prints a text.
    """
    comparison = compare_runs(folders, rtol, noise_runs)
    write_atomically(output, json.dumps(comparison, indent=1) + "\n")
    show(format_table(comparison_rows(comparison)) + f"\n{_CPU_NOTE}" * (comparison["device"] == "cpu"))
    return [result["fault"] for result in comparison["backends"].values() if result["fault"]]
