"""The training run. One step's path: batch -> ids to the owners -> lookup and exchange, which returns at once ->
bottom MLP -> wait -> interaction -> top MLP -> loss -> backward -> optimizers. `Trainer.step` takes it.
"""

import itertools
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dlrm_overlap.checkpoint import Checkpointer, checkpoint_shape, step_of, trained_with, weights_are_finite
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.loader import Loader, make_loader
from dlrm_overlap.embedding.plan import build_plan, build_topology
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import build_sharder
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.model import TrainTask, build_model
from dlrm_overlap.observe.metrics import StepTimer, evaluation_metrics, gather_predictions
from dlrm_overlap.observe.run_log import RunLog, check_folder, read_summary
from dlrm_overlap.pipeline import LearningRate, build_optimizer, build_pipeline, shard_model

log = logging.getLogger("dlrm_overlap")


class NotFiniteError(InputError):
    """A loss or a weight is NaN or infinite: what the run has learnt is lost. All ranks raise it at the same step."""


def total_steps(config: Config, train: Dataset, world_size: int) -> int:
    """Return the number of training steps: as configured, or what the epochs of a finite data set hold.

    Raises:
        InputError: if the data set is smaller than one global batch, or the run ends before the steps to trace do.
    """
    steps = config.train.steps or _steps_of_epochs(config, train, world_size)
    if (traced := config.log.traced) and traced[-1] > steps:
        raise InputError(
            f"log.trace_first: {traced[0]}, and so steps up to {traced[-1]} are to be traced, but the run ends after "
            f"step {steps}; trace earlier ones"
        )
    return steps


def _steps_of_epochs(config: Config, train: Dataset, world_size: int) -> int:
    assert train.num_samples is not None
    batch = config.train.samples_per_rank(world_size) * world_size
    if train.num_samples < batch:
        raise InputError(
            f"train.batch_size: a global batch of {batch} samples is more than the {train.num_samples} there are to "
            f"train on; take a smaller one"
        )
    return config.train.epochs * train.num_samples // batch


def check_device(config: Config, device: torch.device) -> None:
    """Check that nothing is asked of a CPU that only GPUs do, nor of the backend what others do.

    Raises:
        InputError: naming the key.
    """
    gpu_only = {
        "train.precision": (config.train.precision, "tf32", "fp32"),
        "train.graph_dense": (config.train.graph_dense, True, "false"),
        "embedding.plan": (config.embedding.plan, "row_wise", "auto"),
    }
    for key, (value, forbidden, cure) in gpu_only.items():
        if device.type == "cpu" and value == forbidden:
            raise InputError(f"{key}: {value} needs a GPU, and this run is on a CPU; set --{key} {cure}")
    if not config.embedding.has_backward:
        raise InputError(
            f"embedding.backward: {config.embedding.backward}, but backend {config.embedding.backend} has a backward "
            f"of its own; set --embedding.backward auto, or --embedding.backend pgas or fused"
        )


class Trainer:
    """Builds a run on this rank and takes its steps. The process group must exist; all ranks build alike."""

    def __init__(self, config: Config, world: World, device: torch.device, train: Dataset, held_out: Dataset) -> None:
        self.config, self.world, self.device = config, world, device
        self.train_data, self.held_out_data = train, held_out
        self.samples_per_rank = config.train.samples_per_rank(world.world_size)
        self.global_batch = self.samples_per_rank * world.world_size
        self.steps = total_steps(config, train, world.world_size)
        self.folder = config.folder
        rows = list(train.rows)
        self.checkpointer = Checkpointer(
            self.folder / "checkpoints",
            config.checkpoint.keep,
            checkpoint_shape(config, rows),
            trained_with(config, self.global_batch),
        )
        self.start = self.saved = 0
        torch.set_float32_matmul_precision("high" if config.train.precision == "tf32" else "highest")

        group = dist.group.WORLD
        assert group is not None, "the launcher makes the process group before the trainer"
        dlrm = build_model(config.model, config.embedding, rows, config.data.dense_features, config.train.seed)
        task = TrainTask(dlrm, device.type, bf16=config.train.precision == "bf16")
        sharder = build_sharder(config.embedding)
        topology = build_topology(device, world.world_size, world.local_world_size)
        self.plan = build_plan(
            task, sharder, topology, config.embedding, config.model.dim, train.pooling, self.samples_per_rank, group
        )
        graph_samples = self.samples_per_rank if config.train.graph_dense else None
        self.model = shard_model(task, self.plan, sharder, group, device, graph_samples)
        initialise_tables(self.model, config.train.seed)
        self.optimizer = build_optimizer(self.model, config.train)
        self.learning_rate = LearningRate(self.optimizer, config.train)
        self.pipeline = build_pipeline(config.train.pipeline, self.model, self.optimizer, device)

    def step(self, batches: Iterator[Batch]) -> torch.Tensor:
        """Take one training step on the next of `batches` and return this rank's mean loss [], still on the device."""
        with self._told():
            loss, _, _ = self.pipeline.progress(batches)
        return loss

    def fit(self, replace: bool = False) -> dict[str, Any]:
        """Go on where the folder's run left off, train to the end or the target, evaluate, and return the summary.

        Of a run that is finished, nothing is touched.

        Args:
            replace: start anew, and write over what an earlier run left in the folder.

        Raises:
            InputError: if the folder's run is not one to go on with.
            NotFiniteError: if a loss or a weight is not finite.
        """
        if not replace:
            check_folder(self.config)
            if (summary := self._resume()) is not None:
                return summary
        every_eval, every_save = self.config.train.eval_every, self.config.checkpoint.every
        save_last, target = self.config.checkpoint.last, self.config.train.target_auroc
        if every_save or save_last:
            self.checkpointer.make_shared_folder()
        step, evaluated, values = self.start, -1, {}
        with (
            RunLog(self.config, self.world, self.device, self.folder, self.start, self.steps, self.plan) as run_log,
            self.loader(self.train_data, self.start, self.steps) as loader,
        ):
            batches = iter(loader)
            while step < self.steps:
                border = min([self.steps, *((step // n + 1) * n for n in (every_eval, every_save) if n)])
                self._train(step, border, batches, loader, run_log)
                step = border
                if (every_save and step % every_save == 0) or (save_last and step == self.steps):
                    self.save(step)
                if every_eval and step % every_eval == 0:
                    values, evaluated = self._evaluate(step, run_log), step
                    if target and values["auroc"] >= target:
                        log.info("early stop at step %d: AUROC %.4f reached %.4f", step, values["auroc"], target)
                        if save_last:
                            self.save(step)
                        break
            if evaluated != step:
                values = self._evaluate(step, run_log)
            with self._told():
                return run_log.summary(step, values)

    def _resume(self) -> dict[str, Any] | None:
        """Load the checkpoint to go on from, if there is one; return the folder's summary if its run is finished."""
        config = self.config
        checkpoint = self.checkpointer.find(config.checkpoint.resume, config.checkpoint.resume_changed)
        if checkpoint is None:
            return None
        self.start = self.saved = step_of(checkpoint)
        summary, target = read_summary(self.folder), config.train.target_auroc
        if summary is not None:
            reached = 0 < target <= summary["eval_auroc"]
            if reached or summary["steps"] >= self.steps:
                why = f"train.target_auroc {target} is reached" if reached else f"train.steps is {self.steps}"
                place = self.folder / "summary.json"
                text = "finished already, nothing is trained: step %d was the last, since %s; results in %s"
                log.info(text, summary["steps"], why, place)
                return summary
        with self._told():
            self.checkpointer.load(checkpoint, self.model, self.optimizer)
        for exchange in exchanges(self.model):
            exchange.steps = self.start  # whose stochastic rounding goes on, too
        log.info("resume: %s, after step %d", checkpoint, self.start)
        return None

    def _train(self, first: int, last: int, batches: Iterator[Batch], loader: Loader, run_log: RunLog) -> None:
        """Take the steps [first, last); the pipeline runs empty at the end, so that nothing is in flight there."""
        segment = itertools.islice(batches, last - first)
        self.pipeline.reset()
        timer = StepTimer(self.device)
        timer.mark()
        loss_sum = torch.zeros((), device=self.device)
        for step in range(first + 1, last + 1):
            self.learning_rate.set(step - 1)
            loss_sum += self.step(segment)
            timer.mark()
            run_log.advance()
            if step % self.config.log.every == 0 or step == last:
                factor = self.learning_rate.factor(step - 1)
                with self._told():
                    run_log.training(step, loss_sum, timer.take_ms(), loader.wait_s, factor)
                self._check_exchanges()  # the loss was read, so what kernels had to record is there
                self._require_finite(math.isfinite(run_log.loss), f"the training loss is {run_log.loss}", step)
                loss_sum.zero_()

    def save(self, step: int) -> None:
        """Save a checkpoint after `step`, once, and only of a state that is whole.

        A rank whose kernels have recorded a fault raises it, and so keeps out of the collective: no checkpoint appears.
        """
        if step == self.saved:
            return
        begin = time.perf_counter()
        with self._told():
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
        self._check_exchanges()
        with self._told():
            self._require_finite(weights_are_finite(self.model, self.device), "a weight is nan or infinite", step)
            path = self.checkpointer.save(step, self.model, self.optimizer)
        self.saved = step
        log.info("checkpoint: %s, %.1f s", path, time.perf_counter() - begin)

    def _require_finite(self, finite: bool, otherwise: str, step: int) -> None:
        """Raise `NotFiniteError`, on every rank, unless what was found after `step` is `finite` on all of them."""
        if not finite:
            train, embedding = self.config.train, self.config.embedding
            raise NotFiniteError(
                f"step {step}: {otherwise} and must be finite, so the run ends here and does not save this state; "
                f"lower train.lr {train.lr:g} or embedding.lr {embedding.lr:g}, or raise train.warmup_steps "
                f"{train.warmup_steps}"
            )

    def _check_exchanges(self) -> None:
        for exchange in exchanges(self.model):
            exchange.check()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turn an error that follows from what a kernel has recorded into what it has recorded.

        A kernel that gives up on a peer, or finds an id outside its table, stops the GPU: whatever asks CUDA next, be
        it a step, a loss to log or a checkpoint, is told no more than that.
        """
        try:
            yield
        except (RuntimeError, CheckpointException):
            self._check_exchanges()
            raise

    def _evaluate(self, step: int, run_log: RunLog) -> dict[str, float]:
        """Evaluate after `step` and log it."""
        with self._told():
            values = self.evaluate()
        self._check_exchanges()
        run_log.evaluation(step, values)
        self._require_finite(math.isfinite(values["loss"]), f"the held-out loss is {values['loss']}", step)
        return values

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return loss, AUROC and NE over the held-out samples of all ranks, the same on every rank."""
        samples, b, world_size = self.held_out_data.num_samples, self.samples_per_rank, self.world.world_size
        assert samples is not None, "an endless data set cannot be evaluated"
        steps = math.ceil(samples / self.global_batch)
        logits, labels = [], []
        self.model.eval()
        self.pipeline.reset()
        with self.loader(self.held_out_data, 0, steps) as loader:
            batches = iter(loader)
            for _ in range(steps):
                _, batch_logits, batch_labels = self.pipeline.progress(batches)
                logits.append(batch_logits)
                labels.append(batch_labels)
        self.model.train()
        gathered = gather_predictions(torch.cat(logits), torch.cat(labels))
        # Back into the data set's order, step by step; the last batch went past the end, where samples repeat.
        logit, label = (x.view(world_size, steps, b).transpose(0, 1).flatten()[:samples] for x in gathered)
        values = evaluation_metrics(logit, label)
        agreed = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.broadcast(agreed, 0)  # all must agree on the early stop to the last bit
        return dict(zip(values, agreed.tolist(), strict=True))

    def loader(self, dataset: Dataset, first_step: int, last_step: int) -> Loader:
        """Return this rank's part of the global batches [first_step, last_step) of `dataset`."""
        distinct_steps = self.config.data.distinct_steps if dataset is self.train_data else 0
        data = self.config.data
        return make_loader(
            dataset,
            batch_size=self.samples_per_rank,
            rank=self.world.rank,
            world_size=self.world.world_size,
            first_step=first_step,
            last_step=last_step,
            workers=data.workers,
            prefetch=data.prefetch,
            pin_memory=self.device.type == "cuda",
            distinct_steps=distinct_steps,
        )

    def close(self) -> None:
        """Release what outlives Python references: the exchange's windows. No rank may be in a step."""
        for exchange in exchanges(self.model):
            exchange.close()
