"""Compares several runs of one configuration by their files; only runs whose losses agree get a speedup."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dlrm_overlap.launching.text_table import format_table
from dlrm_overlap.observe.agreement import find_fault, greatest_difference
from dlrm_overlap.observe.result_files import is_number, nan_as_none, read_records, read_summary, write_atomically

_RESULTS = ("train_loss", "eval_loss", "eval_auroc", "eval_ne", "samples_per_s", "step_ms_p50", "step_ms_p95")
_SHARED = ("world_size", "device", "global_batch_size", "versions")
_COLUMNS = {
    "train loss": ("train_loss", ".6f"),
    "AUROC": ("eval_auroc", ".4f"),
    "samples/s": ("samples_per_s", ".0f"),
    "p50, ms": ("step_ms_p50", ".4g"),
    "p95, ms": ("step_ms_p95", ".4g"),
    "speedup": ("speedup", ".2f"),
}
_CPU_NOTE = "On CPUs, plain PyTorch replaces the kernels of pgas and fused: only speedups on GPUs are meaningful."


def compare_runs(folders: Mapping[str, Path], rtol: float, noise_runs: int = 0) -> dict[str, Any]:
    """Return the contents of `comparison.json`; the first run is the reference, the next `noise_runs` repeat it."""
    reference, *others = folders
    # A run whose loss was not finite ended early and has no summary.
    summaries = {name: read_summary(folder) or {} for name, folder in folders.items()}
    losses = {name: _read_losses(folder) for name, folder in folders.items()}
    first, again = losses[reference], [losses[name] for name in others[:noise_runs]]
    results = {}
    for backend in [reference, *others[noise_runs:]]:
        summary, fault = summaries[backend], find_fault(losses[backend], first, again, rtol)
        if not fault and not (summary and summaries[reference]):
            fault = "a run has no summary.json that can be read"
        results[backend] = {
            **nan_as_none({key: summary.get(key) for key in _RESULTS}),
            "speedup": None if fault else _ratio(summaries[reference]["step_ms_p50"], summary["step_ms_p50"]),
            "max_relative_difference": greatest_difference(losses[backend], first),
            "agree": fault is None,
            "fault": fault and f"{backend} against {reference}: {fault}",
        }
    shared = next(filter(None, summaries.values()), {})
    return {
        "reference": reference,
        "rtol": rtol,
        "noise": [greatest_difference(each, first) for each in again],
        "agree": all(result["agree"] for result in results.values()),
        **{key: shared.get(key) for key in _SHARED},
        "backends": results,
    }


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if numerator > 0 and denominator > 0 else None


def _read_losses(folder: Path) -> dict[int, float]:
    losses = {}
    for record in read_records(folder / "metrics.jsonl"):
        if "train/loss" in record:
            loss = record["train/loss"]
            losses[record["step"]] = loss if is_number(loss) else math.nan
    return losses


def comparison_rows(comparison: Mapping[str, Any]) -> list[list[str]]:
    rows = [["backend", *_COLUMNS, "losses"]]
    for backend, result in comparison["backends"].items():
        difference = result["max_relative_difference"]
        verdict = f"agree to {difference:.1e}" if difference else "identical"
        if backend == comparison["reference"]:
            noise = max((each or 0.0 for each in comparison["noise"]), default=None)
            verdict = "reference" if noise is None else f"reference (noise {noise:.1e})"
        numbers = [(result[key], spec) for key, spec in _COLUMNS.values()]
        cells = ["-" if value is None else format(value, spec) for value, spec in numbers]
        rows.append([backend, *cells, verdict if result["agree"] else "DISAGREE"])
    return rows


def report(
    folders: Mapping[str, Path],
    rtol: float,
    output: Path,
    noise_runs: int = 0,
    show: Callable[[str], None] = print,
) -> list[str]:
    """Write `compare_runs` to a JSON file, show its table, and return a line for each run that disagrees."""
    comparison = compare_runs(folders, rtol, noise_runs)
    write_atomically(output, json.dumps(comparison, indent=1) + "\n")
    show(format_table(comparison_rows(comparison)) + f"\n{_CPU_NOTE}" * (comparison["device"] == "cpu"))
    return [result["fault"] for result in comparison["backends"].values() if result["fault"]]
