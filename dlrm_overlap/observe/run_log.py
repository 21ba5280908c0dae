"""The log of a run: log lines, `metrics.jsonl`, TensorBoard, configuration, summary, and a trace of each rank."""

import json
import logging
import math
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import yaml
from torchrec.distributed.types import ShardingPlan

from dlrm_overlap.checkpoint.manifest import newest_checkpoint, same_checkpoint
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.launching.environment import environment
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.launching.text_table import duration
from dlrm_overlap.observe.event_file import EventFile
from dlrm_overlap.observe.metrics import WARMUP_STEPS, make_tracer, memory_bytes, quantile
from dlrm_overlap.observe.restarts import note_job
from dlrm_overlap.observe.result_files import (
    MetricsFile,
    is_number,
    nan_as_none,
    read_records,
    remove,
    write_atomically,
)

log = logging.getLogger("dlrm_overlap")


def start_logging(rank: int) -> None:
    """Send the package's log to standard error: everything on rank 0, only warnings on other ranks."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank}: %(message)s", "%H:%M:%S"))
    if rank > 0:  # rank 0 shows the same warnings of libraries
        warnings.filterwarnings("ignore", category=UserWarning, module="torchrec|torch")
    log.handlers = [handler]
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    log.propagate = False


def check_folder(config: Config) -> None:
    """Refuse a run that would overwrite results, mix the checkpoints of two runs, or move away the one to resume from.

    Raises an InputError. An earlier run that left neither a checkpoint nor a summary does not count.
    """
    folder, resume = config.folder, config.checkpoint.resume
    if config.log.overwrite:  # everything in the folder is moved away, once its lock is held
        if same_checkpoint(folder / "checkpoints", Path(resume)):
            raise InputError(
                f"checkpoint.resume: {resume} is in {folder}, which log.overwrite moves aside; leave log.overwrite out "
                f"to resume there, or give another --log.name"
            )
        return
    if newest := newest_checkpoint(folder / "checkpoints"):
        if resume != "auto" and not same_checkpoint(newest.parent, Path(resume)):
            raise InputError(
                f"checkpoint.resume: {resume}, but {newest} is an earlier run's, which a later resume would mistake "
                f"for this run's; leave checkpoint.resume out to resume there, move it aside with --log.overwrite "
                f"true, or give another --log.name"
            )
    elif (folder / "summary.json").exists():
        raise InputError(
            f"log.name: {folder} has the results of an earlier run, and no checkpoint to resume from; move them aside "
            f"with --log.overwrite true, or give another --log.name"
        )


class RunLog:
    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        folder: Path,
        start: int,
        end: int,
        plan: ShardingPlan,
        backend: str,
        evaluates_first: bool = False,
    ) -> None:
        """Open the files of a run that takes the steps `start` + 1 to `end`; it may evaluate before the first."""
        self.end, self._taken = end, 0
        self.config, self.world, self.device, self.folder, self.start = config, world, device, folder, start
        self.backend = backend
        self.global_batch = config.train.samples_per_rank(world.world_size) * world.world_size
        self.step_ms: list[float] = []
        self.loss = math.nan
        self.waited_s = self._own_wait_s = 0.0
        self.asked_to_end = False
        self.versions = environment()
        self._tracer = self._metrics = self._board = None
        asked = config.log.traced
        traced = range(asked.start, min(asked.stop, end + 1))
        if traced and start < traced.start:
            file = f"steps_{traced[0]}_{traced[-1]}_rank_{world.rank}.json.gz"
            self._tracer = make_tracer(folder / "traces" / file, traced.start - 1 - start, len(traced))
        if world.rank:
            return
        # Remove an earlier run's files.
        remove(folder / "summary.json")
        if start == 0:
            shutil.rmtree(folder / "traces", ignore_errors=True)
            for old in folder.glob("events.out.tfevents.*"):
                if not old.is_dir():  # TensorBoard makes no folders
                    remove(old)
        # Open this run's files.
        shown = config.as_dict()
        # A run of this file is to resume this run. A path stays: it is used until this run has a checkpoint.
        shown["log"]["overwrite"] = False
        if shown["checkpoint"]["resume"] == "never":
            shown["checkpoint"]["resume"] = "auto"
        resolved = yaml.safe_dump(shown, sort_keys=False)
        write_atomically(folder / "config.yaml", resolved)
        note_job(folder, config)
        self._metrics = MetricsFile(folder / "metrics.jsonl", start, evaluates_first)
        # The line of the training up to `start`, where this run may train nothing more.
        records = read_records(folder / "metrics.jsonl") if evaluates_first else []
        trained = [record for record in records if record["step"] == start]
        losses = [float(record["train/loss"]) for record in trained if is_number(record.get("train/loss"))]
        self.loss = losses[-1] if losses else math.nan
        if asked and not self._tracer:
            self._warn_of_no_trace("resumes later" if start >= asked.start else f"ends after step {end}")
        if config.log.tensorboard:
            try:
                self._board = EventFile(folder, start, evaluates_first)
                for record in trained:
                    numbers = {key: record[key] for key in record if key != "step" and is_number(record[key])}
                    self._board.add_scalars(start, numbers)
                self._board.add_text("config", f"```yaml\n{resolved}```")
                self._board.add_text("plan", f"```\n{plan}\n```")
            except OSError as error:
                raise InputError(
                    f"log.dir: {folder} cannot be written to ({error.strerror}); free disk space, or give another "
                    f"folder"
                ) from None

    def __enter__(self) -> Self:
        if self._tracer:
            self._tracer.start()
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if self._tracer and error is None:  # it waits for the GPU, so not after an error
            self._trace(self._tracer.stop)
            if (last := self.start + self._taken) < self.config.log.trace_first and not self.world.rank:
                self._warn_of_no_trace(f"has ended after step {last}")
        if self._metrics:
            self._metrics.close()
        if self._board:
            self._board.close()

    def _warn_of_no_trace(self, why: str) -> None:
        log.warning("log.trace_first: %d, but the run %s: no step is traced", self.config.log.trace_first, why)

    def advance(self) -> None:
        self._taken += 1
        if self._tracer:
            self._trace(self._tracer.step)

    def _trace(self, act: Callable[[], None]) -> None:
        """Call `act` of the tracer, which may write the trace."""
        try:
            act()
        except OSError as error:
            log.warning("log.trace_steps: no trace can be written (%s); the run continues", error.strerror)
            self._tracer = None

    def training(
        self,
        step: int,
        loss_sum: torch.Tensor,
        step_ms: list[float],
        wait_s: float,
        lr_factor: float,
        metrics: Mapping[str, float],
        asked_to_end: bool = False,
    ) -> None:
        """Log the steps since the last call, up to `step`, and let the ranks agree on ending early; a collective.

        Args:
            loss_sum: [] sum of this rank's losses over these steps.
            step_ms: length of each of these steps on this rank.
            wait_s: seconds that this rank has waited for input since the start.
            lr_factor: current factor of the learning rates.
            metrics: metrics of these steps over all ranks.
            asked_to_end: True if this rank was asked to end; `self.asked_to_end` becomes true if any rank was.

        Raises:
            InputError: on all ranks, if the run's folder or metrics.jsonl is gone.
        """
        # Combine the ranks' loss, wait and requests to end.
        count = len(step_ms)
        loss = loss_sum.double()
        is_lost = self._metrics is not None and not self._metrics.is_in_place
        maxima = torch.tensor(
            [wait_s - self._own_wait_s, asked_to_end, is_lost], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(loss)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)  # every rank waits for the slowest, which may change
        waited_s, asked, lost = maxima.tolist()
        if lost:
            raise InputError(
                f"log.dir: step {step}: {self.folder}, or metrics.jsonl in it, was removed or moved while the run was "
                f"writing to it, so the run ends here; run again, and do not touch the folder until the run has ended"
            )
        # Log the means over these steps.
        self.asked_to_end = bool(asked)
        self.loss = loss.item() / self.world.world_size / count
        mean_ms, wait_ms = sum(step_ms) / count, waited_s * 1e3 / count
        self.waited_s += waited_s
        self._own_wait_s = wait_s
        self.step_ms += step_ms
        self._write(
            step,
            {
                "train/loss": self.loss,
                "train/lr_factor": lr_factor,
                **{f"train/{key}": value for key, value in metrics.items()},
                "speed/samples_per_s": self.global_batch * 1e3 / mean_ms,
                "speed/step_ms": mean_ms,
                **{f"speed/step_ms_p{percent}": quantile(step_ms, percent / 100) for percent in (10, 50, 90)},
                "speed/input_wait_ms": wait_ms,
                "memory/peak_bytes": float(memory_bytes(self.device)),
            },
        )
        where, left = f"step {step} of {self.end}", self._time_left(step, mean_ms)
        log.info("%s: loss %.4f, %.1f ms a step, %.1f ms of it input wait%s", where, self.loss, mean_ms, wait_ms, left)

    def _time_left(self, step: int, mean_ms: float) -> str:
        """Return ", 9 s left", from the mean of the last steps, evaluations and saves aside; "" after the last step."""
        if step >= self.end:
            return ""
        train = self.config.train
        at_most = "at most " if train.target_auroc and train.eval_every else ""
        return f", {at_most}{duration((self.end - step) * mean_ms / 1e3)} left"

    def evaluation(
        self, step: int, values: dict[str, float], windows: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        self._write(step, {f"eval/{key}": value for key, value in values.items()}, windows)
        log.info(
            "step %d: held out AUROC %.4f, NE %.4f, loss %.4f", step, values["auroc"], values["ne"], values["loss"]
        )

    def summary(
        self,
        step: int,
        values: dict[str, float],
        trained: Mapping[str, float],
        windows: Mapping[str, Mapping[str, float]] | None = None,
    ) -> dict[str, Any]:
        """Write `summary.json` and return the summary; a collective.

        `values` and `windows` are metrics of the last evaluation, `trained` metrics of all training samples. Times are
        this rank's.
        """
        times = self.step_ms[WARMUP_STEPS:] or self.step_ms
        memory = torch.tensor(memory_bytes(self.device), dtype=torch.float64, device=self.device)
        dist.all_reduce(memory, dist.ReduceOp.MAX)
        summary: dict[str, Any] = {
            "steps": step,
            "train_loss": self.loss,
            **{f"train_{key}": value for key, value in trained.items()},
            **{f"eval_{key}": value for key, value in values.items()},
            **({"eval_windows": windows} if windows else {}),
            "samples_per_s": self.global_batch * 1e3 * len(times) / sum(times) if times else math.nan,
            **{f"step_ms_p{percent}": quantile(times, percent / 100) for percent in (10, 50, 90, 95)},
            "input_wait_ms": self.waited_s * 1e3 / len(self.step_ms) if self.step_ms else math.nan,
            "peak_memory_bytes": int(memory.item()),
            "backend": self.backend,
            "world_size": self.world.world_size,
            "global_batch_size": self.global_batch,
            "device": self.device.type,
            "versions": self.versions,
        }
        if self.world.rank == 0:
            write_atomically(self.folder / "summary.json", json.dumps(nan_as_none(summary), indent=1) + "\n")
        return summary

    def _write(
        self, step: int, values: dict[str, float], windows: Mapping[str, Mapping[str, float]] | None = None
    ) -> None:
        try:
            if self._metrics:
                self._metrics.write({"step": step, **values, **({"eval/windows": windows} if windows else {})})
            if self._board:
                self._board.add_scalars(step, {key: value for key, value in values.items() if math.isfinite(value)})
        except OSError as error:
            log.warning("step %d cannot be logged (%s); the run continues", step, error.strerror)
