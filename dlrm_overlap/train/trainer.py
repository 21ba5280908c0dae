"""A training run; docs/architecture.md follows one step file by file."""

import gc
import logging
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint.checkpoint import Checkpointer, checkpoint_shape, samples_of, trained_with
from dlrm_overlap.checkpoint.deltas import Deltas
from dlrm_overlap.checkpoint.manifest import Manifest, newest_checkpoint
from dlrm_overlap.checkpoint.row_changes import mark_updates
from dlrm_overlap.checkpoint.saving import Saves, require_finite
from dlrm_overlap.config import InputError
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.loader import Loader
from dlrm_overlap.embedding.id_tables.counts import IdCounts
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.launching import supported_versions
from dlrm_overlap.launching.lifetime import EndRequest
from dlrm_overlap.observe.metrics import RunningMetrics, StepTimer
from dlrm_overlap.observe.result_files import has_results, read_summary, set_aside
from dlrm_overlap.observe.run_folder import from_rank_0, hold_run_folder
from dlrm_overlap.observe.run_log import RunLog, check_folder
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.growth import Growth
from dlrm_overlap.train.stepping import EvaluationEndedError, StepRunner

log = logging.getLogger("dlrm_overlap")


class PreemptedError(Exception):
    """A run was asked to end before its last step; every rank raises this after the same step."""

    def __init__(self, message: str, has_saved: bool) -> None:
        super().__init__(message)
        self.has_saved = has_saved


class _Segment(Iterator[Batch]):
    """Yields up to `steps` batches; `cut` ends it after the batches already yielded."""

    def __init__(self, batches: Iterator[Batch], steps: int) -> None:
        self._batches, self.steps, self._taken = batches, steps, 0

    def __next__(self) -> Batch:
        if self._taken == self.steps:
            raise StopIteration
        self._taken += 1
        return next(self._batches)

    def cut(self) -> None:
        self.steps = self._taken


class Trainer(StepRunner):
    """A `StepRunner` that also evaluates on a schedule, logs, saves and resumes."""

    def __init__(self, *args: Any, end: EndRequest | None = None, **options: Any) -> None:
        """Take the arguments of `StepRunner`; `end` asks `fit` to end early."""
        super().__init__(*args, **options)
        config, train = self.config, self.train_data
        self._end, self.folder, self.start = end or EndRequest(), config.folder, 0
        self._ended_unevaluated = False
        """whether the run was asked to end after step `start`, where an evaluation was due"""
        self.checkpointer = Checkpointer(
            self.folder / "checkpoints",
            config.checkpoint.keep,
            checkpoint_shape(config, list(train.rows), train.dense_features),
            {**trained_with(config, self.global_batch), **samples_of(train, self.held_out_data)},
            train.encoded,
        )
        self.checkpointer.tick = self.progress.tick
        self.checkpointer.about = {
            "config": config.as_dict(),
            "backend": self.embedding.backend,
            **self._about_model(),
            "world_size": self.world.world_size,
            "versions": {name: supported_versions.version_of(name) for name in ("torch", "torchrec")},
            "trained_metrics": [],
        }
        self.running = RunningMetrics(list(train.labels), self.samples_per_rank, config.log.every, self.device)
        self._count_ids()
        id_tables, counts = config.embedding.id_tables, bool(self.id_counts.tables)
        self.growth = Growth(id_tables, self.id_rows, self.embedding.backend, counts)
        self.saves = Saves(
            config,
            self.checkpointer,
            self.model,
            self.optimizer,
            self.device,
            self.check,
            lambda: self._evaluate_on(1)["loss"],
        )
        self.deltas: Deltas | None = None
        if config.checkpoint.delta_every:
            mark_updates(self.model, self.embedding.backend, isinstance(self.pipeline, GraphTrainPipeline))
            self.deltas = Deltas(config, self.checkpointer, self.model, self.device, self.check)

    def _about_model(self) -> dict[str, Any]:
        plan = {
            name: {"sharding": sharding.sharding_type}
            for tables in self.plan.plan.values()
            for name, sharding in sorted(tables.items())  # type: ignore[attr-defined]
        }
        return {"plan": plan, "id_table_rows": self.id_rows}

    def _count_ids(self) -> None:
        self.id_counts = IdCounts(self.model, self.device)

    def fit(self) -> dict[str, Any]:
        """Train to the last step or the target, evaluate, and return the summary; a collective.

        Resumes after the newest checkpoint in the run's folder, whose lock rank 0 holds, and leaves a finished run as
        it is. Files of a run without a checkpoint are moved to `earlier_1` or the next free number.

        Raises:
            InputError: if this run cannot resume from the folder's checkpoint, or another run holds the lock.
            NotFiniteError: if a loss or a weight is not finite.
            PreemptedError: if a rank was asked to end; the state is saved, if this run saves at all.
        """
        with hold_run_folder(self.folder):
            try:
                with self.raising_kernel_errors():
                    return self._fit()
            except Exception as error:
                self.saves.close(error)
                if self.deltas is not None:
                    self.deltas.close(error)
                raise

    def _fit(self) -> dict[str, Any]:
        from_rank_0(lambda: check_folder(self.config))
        from_rank_0(self._set_aside)
        about = self.config.checkpoint
        saves = about.every or about.last or about.delta_every
        # The checkpoint folder may be a link, and another run may have a link to the same folder.
        folder = Path(os.path.realpath(self.checkpointer.folder))
        with hold_run_folder(folder) if saves else nullcontext():
            return self._train_to_end()

    def _train_to_end(self) -> dict[str, Any]:
        if (summary := self._resume()) is not None:
            return summary
        every_eval, every_save = self.config.train.eval_every, self.config.checkpoint.every
        save_last, is_over = self.config.checkpoint.last, False
        if self.config.train.target_auroc and not every_eval and self.world.rank == 0:
            log.warning(
                "train.target_auroc: %s stops nothing, as train.eval_every 0 evaluates after the last step only; set "
                "train.eval_every, or train.target_auroc 0",
                self.config.train.target_auroc,
            )
        self.saves.prepare(self.world.local_world_size)
        self._prepare_deltas()
        every_delta = self.config.checkpoint.delta_every
        step, evaluated, values = self.start, -1, {}
        with (
            RunLog(
                self.config,
                self.world,
                self.device,
                self.folder,
                self.start,
                self.steps,
                self.plan,
                self.embedding.backend,
                evaluates_first=self._ended_unevaluated or self.start >= self.steps,
            ) as run_log,
            self.loader(self.train_data, self.start, self.steps) as loader,
        ):
            batches = iter(loader)
            if self._ended_unevaluated:
                values, evaluated = self._evaluate(step, run_log), step
                is_over = self._reaches_target(step, values)
            while step < self.steps and not is_over:
                # The next step after which the run evaluates, saves, writes a delta or ends.
                borders = ((step // n + 1) * n for n in (every_eval, every_save, every_delta) if n)
                step = self._train(step, min([self.steps, *borders]), batches, loader, run_log)
                if self.deltas is not None and step % every_delta == 0:
                    self.deltas.write(step)
                if run_log.asked_to_end and step < self.steps:
                    self._end_early(step)
                if every_eval and step % every_eval == 0:
                    values, evaluated = self._evaluate(step, run_log), step
                if (every_save and step % every_save == 0) or (save_last and step == self.steps):
                    self.save(step, values if evaluated == step else None, background=step < self.steps)
                is_over = evaluated == step and self._reaches_target(step, values)
                if step < self.steps and not is_over and (rows := self.growth.due(self.id_counts.fullest)):
                    self.grow(step, rows, values if evaluated == step else None)
            if evaluated != step:
                values = self._evaluate(step, run_log)
            self._finish_writing()
            return run_log.summary(step, values, self.running.lifetime(), self.window_metrics)

    def _reaches_target(self, step: int, values: dict[str, float]) -> bool:
        """Return whether the evaluation after `step` ends the run, whose state is then saved."""
        target = self.config.train.target_auroc
        if not 0 < target <= values["auroc"]:  # the AUROC is nan if all labels are equal
            return False
        log.info("early stop at step %d: AUROC %.4f reached %.4f", step, values["auroc"], target)
        if self.config.checkpoint.last:
            self.save(step, values)
        return True

    def _set_aside(self) -> None:
        """Move away the files of a run that ended before its first checkpoint or, with `log.overwrite`, of any run."""
        ended_early = newest_checkpoint(self.checkpointer.folder) is None and has_results(self.folder)
        if (self.config.log.overwrite or ended_early) and (aside := set_aside(self.folder)):
            why = "log.overwrite" if self.config.log.overwrite else "a run ended here before its first checkpoint"
            log.info("%s: the earlier contents of %s are now in %s", why, self.folder, aside)

    def _prepare_deltas(self) -> None:
        if self.deltas is None:
            return
        if self.saves.written is None:  # the run has not resumed
            self.saves.save_initial()  # what the first delta follows
        assert self.saves.written is not None, "resumed or saved"
        self.deltas.prepare(self.start, self.saves.written)

    def _finish_writing(self) -> None:
        self.saves.finish()
        if self.deltas is not None:
            self.deltas.finish()

    def _end_early(self, step: int) -> NoReturn:
        self._finish_writing()  # raises if a failed save is what ended the run
        saves = bool(self.config.checkpoint.every or self.config.checkpoint.last)
        if saves:
            self.save(step)
        self.progress.is_over = True
        if saves:
            restarts = {
                "log.overwrite": self.config.log.overwrite,
                "checkpoint.resume": self.config.checkpoint.resume != "auto",
            }
            without = " and ".join(key for key, is_set in restarts.items() if is_set)
            same = "the same command" + f" without {without}" * bool(without)
            raise PreemptedError(f"asked to end: step {step} is saved, and {same} resumes from there", True)
        raise PreemptedError(
            f"asked to end after step {step}: nothing is saved, since checkpoint.every and checkpoint.last are off",
            False,
        )

    def _train(self, first: int, last: int, batches: Iterator[Batch], loader: Loader, run_log: RunLog) -> int:
        """Take the steps [first, last), or fewer if the run is to end; return the run's number of steps so far.

        No batch is left in flight, and each rank has all dense weights.
        """
        segment = _Segment(batches, last - first)
        self.pipeline.reset()
        timer = StepTimer(self.device)
        timer.mark()
        loss_sum = torch.zeros((), device=self.device)
        step = first
        while step < first + segment.steps:
            step += 1
            self.progress.step = step
            self.learning_rate.set(step - 1)
            loss = self.step(segment)
            loss_sum += loss
            self.running.add(*self.predictions)
            timer.mark()
            run_log.advance()
            if step % self.config.log.every == 0 or step == first + segment.steps:
                factor = self.learning_rate.factor(step - 1)
                asked = self._end.asked or self._has_failed_to_write
                times, metrics = timer.take_ms(), self.running.take() | self.id_counts.take()
                run_log.training(step, loss_sum, times, loader.wait_s, factor, metrics, asked)
                self.check()  # the loss was read, so the kernels' records are complete
                self._require_finite(run_log.loss, "the training loss is", step)
                loss_sum.zero_()
                if run_log.asked_to_end or self.growth.due(self.id_counts.fullest):
                    segment.cut()
        self.gather_dense()
        return step

    @property
    def _has_failed_to_write(self) -> bool:
        return self.saves.failed or (self.deltas is not None and self.deltas.failed)

    def _is_any_rank_asked_to_end(self) -> bool:
        asked = torch.tensor(self._end.asked or self._has_failed_to_write, dtype=torch.int32, device=self.device)
        dist.all_reduce(asked, dist.ReduceOp.MAX)
        return bool(asked)

    def _evaluate(self, step: int, run_log: RunLog) -> dict[str, float]:
        try:
            values = self.evaluate(self._is_any_rank_asked_to_end)
        except EvaluationEndedError:
            self._end_early(step)
        self.check()
        run_log.evaluation(step, values, self.window_metrics)
        self._require_finite(values["loss"], "the held-out loss is", step)
        return values

    def save(self, step: int, metrics: dict[str, float] | None = None, background: bool = False) -> None:
        self.checkpointer.about["trained_metrics"] = self.running.state()
        if self.deltas is None:
            self.saves.save(step, metrics, background)
            return
        self.deltas.write(step)  # so that readers that follow the deltas can go on, whatever is saved
        if not (background and self.config.checkpoint.asynchronous):
            self.deltas.finish()
        self.saves.save(step, metrics, background)
        assert self.saves.written is not None
        self.deltas.follow(step, self.saves.written)

    def grow(self, step: int, rows: dict[str, int], metrics: dict[str, float] | None = None) -> None:
        """Save the state after `step`, and go on from it with more rows of tables of any id; a collective.

        `rows` has the new rows of the tables that grow, `metrics` the results of an evaluation after this step, if any.
        No step is in flight.
        """
        begin, before = time.perf_counter(), self.id_rows
        self.save(step, metrics)
        self.saves.finish()
        self.close()
        # Release the device's memory before the larger model takes it.
        del self.model, self.optimizer, self.pipeline, self.learning_rate, self.id_counts
        self.predictions = []
        self.saves.release()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self._build([rows.get(name, count) for name, count in before.items()])
        self.saves.follow(self.model, self.optimizer)
        self._load(self.checkpointer.folder / f"step_{step}", step)
        self._count_ids()
        self.growth.rows = self.id_rows
        self.checkpointer.about |= self._about_model()
        text = ", ".join(f"table {name} {before[name]} rows, now {count}" for name, count in rows.items())
        log.info("growth: %s, after step %d, %.1f s", text, step, time.perf_counter() - begin)

    def _resume(self) -> dict[str, Any] | None:
        config = self.config.checkpoint
        return self.checkpointer.resume(config.resume, config.allow_config_mismatch, self._resume_from)

    def _resume_from(self, checkpoint: Path, manifest: Manifest) -> dict[str, Any] | None:
        """Load `checkpoint` and return None; if its run is finished, load nothing and return the folder's summary."""
        # Return early if the run is finished.
        config = self.config
        summary, target = from_rank_0(lambda: read_summary(self.folder)), config.train.target_auroc
        if summary is not None and (config.checkpoint.resume == "auto" or manifest.step >= summary["steps"]):
            reached = 0 < target <= summary["eval_auroc"]
            if reached or summary["steps"] >= self.steps:
                train = config.train
                end = f"train.epochs is {train.epochs}" if train.steps is None else f"train.steps is {train.steps}"
                why = f"train.target_auroc {target} is reached" if reached else end
                path = self.folder / "summary.json"
                text = "finished already, nothing is trained: step %d was the last, since %s; to train again, change "
                text += "log.name or set log.overwrite; results in %s"
                log.info(text, summary["steps"], why, path)
                return summary
        # Load the state, possibly into more rows of tables of any id.
        had = manifest.about.get("id_table_rows", {})
        changed = {name: rows for name, rows in self.id_rows.items() if had.get(name, rows) != rows}
        if changed and config.checkpoint.delta_every:
            raise InputError(
                f"checkpoint.delta_every: {config.checkpoint.delta_every}, but {checkpoint} has other rows of tables "
                f"of any id ({', '.join(changed)}), and a delta has the rows of its checkpoint; train without deltas "
                f"to the next save, and resume from that"
            )
        self._load(checkpoint, manifest.step)
        self.start = manifest.step
        if config.checkpoint.resume == "auto":  # else a later run would not resume from this checkpoint
            self.saves.step = manifest.step
        # Continue the schedules of evaluations and saves, and the metrics.
        every = config.train.eval_every
        self._ended_unevaluated = bool(every and self.start and self.start % every == 0 and not manifest.metrics)
        self.saves.written = Future()
        self.saves.written.set_result(manifest)
        try:
            self.running.load(manifest.about.get("trained_metrics", []))
        except ValueError as error:
            if self.world.rank == 0:
                log.warning("resume: %s: %.200s; lifetime_* metrics start at step %d", checkpoint, error, self.start)
        text = "".join(f", table {name} {had[name]} rows, now {rows}" for name, rows in changed.items())
        log.info("resume: %s, after step %d%s", checkpoint, self.start, text)
        return None

    def _load(self, checkpoint: Path, step: int) -> None:
        self.checkpointer.load(checkpoint, self.model, self.optimizer)
        self.optimizer.set_optimizer_step(step)  # FBGEMM's count, for Adam's bias correction
        for exchange in exchanges(self.model):
            exchange.counters.steps.value = step  # stochastic rounding depends on the step

    def _require_finite(self, loss: float, text: str, step: int) -> None:
        require_finite("" if math.isfinite(loss) else f"{text} {loss}", step, self.config)
