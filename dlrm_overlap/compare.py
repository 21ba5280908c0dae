"""Trains one configuration with one backend after another, and compares their losses and speeds.

Correct before fast: a backend whose losses part from the reference's gets no speedup.
"""

import dataclasses
import gc
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.checkpoint import newest_checkpoint
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.observe.run_log import has_results, nan_as_none, read_summary, write_atomically
from dlrm_overlap.observe.text_table import format_table
from dlrm_overlap.trainer import NotFiniteError, Trainer

log = logging.getLogger("dlrm_overlap")

_RESULTS = ("train_loss", "eval_loss", "eval_auroc", "eval_ne", "samples_per_s", "step_ms_p50", "step_ms_p95")
_SHARED = ("world_size", "device", "global_batch_size", "versions")
_CPU_NOTE = "On CPUs step times vary widely from run to run: take speedups from GPUs."
_LEAST_LOSS = 1e-30  # below it, a relative difference means nothing and may overflow


def backend_configs(config: Config, backends: Sequence[str]) -> dict[str, Config]:
    """Return backend -> its configuration: `config`, but trained from the first step on and without checkpoints.

    A comparison that went on where an earlier one ended would compare nothing, and one that saved checkpoints would
    leave them for a later run to go on from. A backend that does not have the backward of `config` takes its own.

    Raises:
        InputError: if the folder of one of the runs holds a checkpoint, and so a run that could go on.
    """
    checkpoint = dataclasses.replace(config.checkpoint, resume="never", every=0, last=False)
    configs = {}
    for backend in backends:
        embedding = dataclasses.replace(config.embedding, backend=backend)
        if not embedding.has_backward:
            embedding = dataclasses.replace(embedding, backward="auto")
        configs[backend] = dataclasses.replace(config, embedding=embedding, checkpoint=checkpoint)
        folder = configs[backend].folder
        if newest := newest_checkpoint(folder / "checkpoints"):
            raise InputError(
                f"log.dir: {newest} is of a run that could go on, whose place {backend} would take; give another "
                f"--log.dir, or remove {folder}"
            )
    return configs


def train_backends(configs: Mapping[str, Config], make_trainer: Callable[[Config], Trainer]) -> dict[str, Path]:
    """Train each of `configs`, one after the other, and return backend -> the run's folder; a collective."""
    folders = {}
    for backend, config in configs.items():
        folders[backend] = _train(config, make_trainer)
        gc.collect()  # the parts of a trainer refer to each other
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return folders


def _train(config: Config, make_trainer: Callable[[Config], Trainer]) -> Path:
    trainer, backend = make_trainer(config), config.embedding.backend
    log.info("backend %s%s", backend, ", in place of the run that lay there" if has_results(config.folder) else "")
    try:
        trainer.fit(replace=True)
    except NotFiniteError as error:  # on every rank, at one step; `find_fault` finds it in the run's losses
        log.info("backend %s: %s", backend, error)
    trainer.close()
    return trainer.folder


def compare_runs(folders: Mapping[str, Path], rtol: float) -> dict[str, Any]:
    """Return the contents of `comparison.json` for the runs in `folders`; the first backend is the reference.

    Args:
        folders: backend -> folder of its finished run.
        rtol: greatest relative difference of a logged training loss that still agrees.
    """
    reference = next(iter(folders))
    # A run whose loss was not finite ended early and has no summary.
    summaries = {backend: read_summary(folder) or {} for backend, folder in folders.items()}
    shared = next((summary for summary in summaries.values() if summary), {})
    losses = {backend: _read_losses(folder) for backend, folder in folders.items()}
    results = {}
    for backend, summary in summaries.items():
        fault = find_fault(losses[backend], losses[reference], rtol)
        difference, step = greatest_difference(losses[backend], losses[reference])
        results[backend] = {
            **nan_as_none({key: summary.get(key) for key in _RESULTS}),
            "speedup": None if fault else summaries[reference]["step_ms_p50"] / summary["step_ms_p50"],
            "max_relative_difference": difference,
            "max_relative_difference_step": step,
            "agree": fault is None,
            "fault": fault and f"{backend} against {reference}: {fault}",
        }
    return {
        "reference": reference,
        "rtol": rtol,
        "agree": all(result["agree"] for result in results.values()),
        **{key: shared.get(key) for key in _SHARED},
        "backends": results,
    }


def _read_losses(folder: Path) -> dict[int, float]:
    """Return step -> logged training loss of a run; a loss that was not finite is NaN."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {r["step"]: math.nan if r["train/loss"] is None else r["train/loss"] for r in records if "train/loss" in r}


def find_fault(losses: Mapping[int, float], reference: Mapping[int, float], rtol: float) -> str | None:
    """Return what is wrong at the first step where `losses` (step -> loss) differ from `reference`; None if none is."""
    for step in sorted(losses.keys() | reference.keys()):
        loss, expected = losses.get(step), reference.get(step)
        if loss is None or expected is None:
            fault = "one of the two is missing"
        elif not (math.isfinite(loss) and math.isfinite(expected)):
            fault = "not finite"
        elif (difference := _relative_difference(loss, expected)) > rtol:
            fault = f"a relative difference of {difference:.1e}"
        else:
            continue
        return f"step {step}: loss {_show(loss, '.8g')} against {_show(expected, '.8g')}, {fault}; tolerance {rtol:g}"
    return None


def greatest_difference(losses: Mapping[int, float], reference: Mapping[int, float]) -> tuple[float | None, int | None]:
    """Return the greatest relative difference of the finite losses that both have, and its step, or (None, None)."""
    differences = [(_relative_difference(losses[step], reference[step]), step) for step in losses if step in reference]
    finite = [(difference, step) for difference, step in differences if math.isfinite(difference)]
    return max(finite, key=lambda found: found[0], default=(None, None))


def _relative_difference(loss: float, expected: float) -> float:
    return abs(loss - expected) / max(abs(expected), _LEAST_LOSS)


def format_comparison(comparison: Mapping[str, Any]) -> str:
    """Return a table with one line for each backend, at most 100 columns wide."""
    header = ["backend", "train loss", "AUROC", "NE", "samples/s", "step p50", "p95 (ms)", "speedup", "losses"]
    rows = [header]
    for backend, result in comparison["backends"].items():
        rows.append(
            [
                backend,
                _show(result["train_loss"], ".6f"),
                _show(result["eval_auroc"], ".4f"),
                _show(result["eval_ne"], ".4f"),
                _show(result["samples_per_s"], ".0f"),
                _show(result["step_ms_p50"], ".2f"),
                _show(result["step_ms_p95"], ".2f"),
                _show(result["speedup"], ".2f"),
                _verdict(result, backend == comparison["reference"]),
            ]
        )
    return format_table(rows)


def _verdict(result: Mapping[str, Any], is_reference: bool) -> str:
    if not result["agree"]:
        return "DISAGREE"
    if is_reference:
        return "reference"
    difference = result["max_relative_difference"]
    return f"agree to {difference:.1e}" if difference else "identical"


def _show(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def report(folders: Mapping[str, Path], rtol: float, output: Path) -> list[str]:
    """Write the comparison to `output`, print its table, and return a line for each backend that disagrees."""
    comparison = compare_runs(folders, rtol)
    write_atomically(output, json.dumps(comparison, indent=1) + "\n")
    print(format_comparison(comparison))
    if comparison["device"] == "cpu":
        print(_CPU_NOTE)
    return [result["fault"] for result in comparison["backends"].values() if result["fault"]]
