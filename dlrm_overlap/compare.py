"""Trains one configuration with one backend after another, or with all in turns, and compares their losses and speeds.

Correct before fast: a backend whose losses part from the reference's gets no speedup. On GPUs the reference is not
deterministic: FBGEMM adds up the gradients of hot rows by atomics, in an order of chance, which training amplifies. So
the reference is trained again there, and what parts it from itself widens the tolerance (`observe.agreement`).
"""

import dataclasses
import gc
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from dlrm_overlap.config import Config, InputError
from dlrm_overlap.observe.agreement import Losses, judge, loss_bound
from dlrm_overlap.observe.bootstrap import speedup_interval
from dlrm_overlap.observe.breakdown import PARTS
from dlrm_overlap.observe.comparison_board import CPU_NOTE, write_board
from dlrm_overlap.observe.finite import NotFiniteError
from dlrm_overlap.observe.result_files import nan_as_none, write_atomically
from dlrm_overlap.observe.run_folder import hold_run_folder
from dlrm_overlap.observe.run_log import has_results, read_step_ms, read_summary
from dlrm_overlap.observe.text_table import format_table
from dlrm_overlap.storage.branches import newest_checkpoint
from dlrm_overlap.trainer import Trainer

log = logging.getLogger("dlrm_overlap")

_RESULTS = ("train_loss", "eval_loss", "eval_auroc", "eval_ne", "samples_per_s", "step_ms_p50", "step_ms_p95")
_SHARED = ("world_size", "device", "global_batch_size", "versions")
_NOISE_RUNS = {"cuda": 2, "cpu": 0}  # with one, the bound would be more than twice as wide


def count_noise_runs(asked: int | str, device: str) -> int:
    """Return how often the reference is trained again: as often as `asked`, or by `device` (cuda | cpu) for auto."""
    return _NOISE_RUNS[device] if asked == "auto" else int(asked)


def noise_run_names(reference: str, count: int) -> list[str]:
    """Return the names of the runs that train the reference again: torchrec_again, torchrec_again_2, .."""
    return [f"{reference}_again" + (f"_{i}" if i > 1 else "") for i in range(1, count + 1)]


def run_configs(config: Config, backends: Sequence[str], noise_runs: int = 0) -> dict[str, Config]:
    """Return run -> its configuration: `config`, but trained from the first step on and without checkpoints.

    Each backend has a run of its name; after the first, the reference, come `noise_runs` more of it.

    A comparison that went on where an earlier one ended would compare nothing, and one that saved checkpoints would
    leave them for a later run to go on from. A backend that does not have the backward of `config` takes its own.

    Raises:
        InputError: if the folder of one of the runs holds a checkpoint, and so a run that could go on.
    """
    checkpoint = dataclasses.replace(config.checkpoint, resume="never", every=0, last=False)
    configs = {}
    again = noise_run_names(backends[0], noise_runs)
    for name in [backends[0], *again, *backends[1:]]:
        backend = backends[0] if name in again else name
        embedding = dataclasses.replace(config.embedding, backend=backend)
        if not embedding.has_backward:
            embedding = dataclasses.replace(embedding, backward="auto")
        run_log = dataclasses.replace(config.log, name=name if name in again else None)
        configs[name] = dataclasses.replace(config, embedding=embedding, checkpoint=checkpoint, log=run_log)
        folder = configs[name].folder
        if newest := newest_checkpoint(folder / "checkpoints"):
            raise InputError(
                f"log.dir: {newest} is of a run that could go on, whose place {name} would take; give another "
                f"--log.dir, or remove {folder}"
            )
    return configs


def train_runs(configs: Mapping[str, Config], make_trainer: Callable[[Config], Trainer]) -> dict[str, Path]:
    """Train each of `configs`, one after the other, and return run -> its folder; a collective.

    Rank 0 holds the lock of `log.dir` meanwhile, from when the first trainer has made the process group.
    """
    folders = {}
    with ExitStack() as stack:
        for name, config in configs.items():
            trainer = make_trainer(config)
            if not folders:
                stack.enter_context(hold_run_folder(Path(config.log.dir)))
            folders[name] = _train(trainer, config)
            del trainer
            _collect()
    return folders


def _collect() -> None:
    """Free the memory of trainers that nothing uses any more, and begin to count the peak anew."""
    gc.unfreeze()  # saves beside training have left what was loaded out of collections
    gc.collect()  # the parts of a trainer refer to each other
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def train_in_turns(
    configs: Mapping[str, Config], make_trainer: Callable[[Config], Trainer], turn: int
) -> dict[str, Path]:
    """Train all of `configs` at once, `turn` steps of one after those of the other, as `train_runs`; a collective.

    What slows the host for a while slows all of them. All trainers are in memory at once.
    """
    folders = _take_turns(configs, make_trainer, turn)
    _collect()
    return folders


def _take_turns(configs: Mapping[str, Config], make_trainer: Callable[[Config], Trainer], turn: int) -> dict[str, Path]:
    with ExitStack() as stack:
        trainers: dict[str, Trainer] = {}
        for name, config in configs.items():
            trainers[name] = make_trainer(config)
            if len(trainers) == 1:
                stack.enter_context(hold_run_folder(Path(config.log.dir)))
            _announce(config)
        left = {name: trainer.fit_in_turns(turn, replace=True) for name, trainer in trainers.items()}
        while left:
            for name, turns in list(left.items()):
                try:
                    next(turns)
                except StopIteration:
                    del left[name]
                except NotFiniteError as error:  # on every rank, at one step; `judge` finds it in the run's losses
                    log.info("backend %s: %s", name, error)
                    del left[name]
        for trainer in trainers.values():
            trainer.close()
        return {name: trainer.folder for name, trainer in trainers.items()}


def _announce(config: Config) -> None:
    earlier = ", in place of the run that lay there" if has_results(config.folder) else ""
    log.info("backend %s%s", config.folder.name, earlier)


def _train(trainer: Trainer, config: Config) -> Path:
    _announce(config)
    try:
        trainer.fit(replace=True)
    except NotFiniteError as error:  # see `train_in_turns`
        log.info("backend %s: %s", config.folder.name, error)
    trainer.close()
    return trainer.folder


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
) -> list[str]:
    """Write the comparison to `output`, print its table, and return a line for each backend that disagrees.

    Args:
        folders: see `compare_runs`, as for `rtol`, `noise_runs` and `turn`.
        output: JSON file; TensorBoard's part comes into the folder `comparison` beside it, and into the runs' folders.
        tensorboard: whether that is written.
    """
    comparison = compare_runs(folders, rtol, noise_runs, turn)
    write_atomically(output, json.dumps(comparison, indent=1) + "\n")
    if tensorboard:
        losses = {name: _read_losses(folder) for name, folder in folders.items()}
        write_board(output.parent / "comparison", folders, losses, comparison)
    print(format_comparison(comparison))
    if comparison["device"] == "cpu":
        print(CPU_NOTE)
    return [result["fault"] for result in comparison["backends"].values() if result["fault"]]
