"""The training run. One step's path: batch -> ids to the owners -> lookup and exchange, which returns at once ->
bottom MLP -> wait -> interaction -> top MLP -> loss -> backward -> optimizers. `Trainer.step` takes it.
"""

import itertools
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint import Checkpointer, checkpoint_shape
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.loader import Loader, make_loader
from dlrm_overlap.embedding.plan import build_plan, build_topology
from dlrm_overlap.embedding.sharder import build_sharder, exchanges
from dlrm_overlap.embedding.weights import initialise_tables
from dlrm_overlap.launcher import Launch
from dlrm_overlap.metrics import StepTimer, evaluation_metrics, gather_predictions
from dlrm_overlap.model import TrainTask, build_model
from dlrm_overlap.pipeline import LearningRate, build_optimizer, build_pipeline, shard_model
from dlrm_overlap.run_log import RunLog

log = logging.getLogger("dlrm_overlap")


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

    def __init__(self, config: Config, launch: Launch, device: torch.device, train: Dataset, held_out: Dataset) -> None:
        self.config, self.launch, self.device = config, launch, device
        self.train_data, self.held_out_data = train, held_out
        self.samples_per_rank = config.train.samples_per_rank(launch.world_size)
        self.global_batch = self.samples_per_rank * launch.world_size
        self.steps = total_steps(config, train, launch.world_size)
        self.folder = Path(config.log.dir) / (config.log.name or config.embedding.backend)
        rows = list(train.rows)
        self.checkpointer = Checkpointer(
            self.folder / "checkpoints", config.checkpoint.keep, checkpoint_shape(config, rows)
        )
        resume = self.checkpointer.find(config.checkpoint.resume, config.checkpoint.every)
        torch.set_float32_matmul_precision("high" if config.train.precision == "tf32" else "highest")

        group = dist.group.WORLD
        assert group is not None, "the launcher makes the process group before the trainer"
        dlrm = build_model(config.model, config.embedding, rows, config.data.dense_features, config.train.seed)
        task = TrainTask(dlrm, device.type, bf16=config.train.precision == "bf16")
        sharder = build_sharder(config.embedding)
        topology = build_topology(device, launch.world_size, launch.local_world_size)
        self.plan = build_plan(
            task, sharder, topology, config.embedding, config.model.dim, train.pooling, self.samples_per_rank, group
        )
        graph_samples = self.samples_per_rank if config.train.graph_dense else None
        self.model = shard_model(task, self.plan, sharder, group, device, graph_samples)
        initialise_tables(self.model, config.train.seed)
        self.optimizer = build_optimizer(self.model, config.train)
        self.learning_rate = LearningRate(self.optimizer, config.train)
        self.pipeline = build_pipeline(config.train.pipeline, self.model, self.optimizer, device)
        self.start = self.checkpointer.load(resume, self.model, self.optimizer) if resume else 0
        if resume:
            log.info("resume: %s, after step %d", resume, self.start)

    def step(self, batches: Iterator[Batch]) -> torch.Tensor:
        """Take one training step on the next of `batches` and return this rank's mean loss [], still on the device."""
        try:
            loss, _, _ = self.pipeline.progress(batches)
        except RuntimeError:
            for exchange in exchanges(self.model):
                exchange.check()  # a kernel that gave up on a peer stopped the GPU: tell that, not CUDA's error
            raise
        return loss

    def fit(self) -> dict[str, Any]:
        """Train to the end or the target, evaluate, write the run's files, and return the summary."""
        every_eval, every_save = self.config.train.eval_every, self.config.checkpoint.every
        target = self.config.train.target_auroc
        step, evaluated, values = self.start, -1, {}
        with (
            RunLog(self.config, self.launch, self.device, self.folder, self.start, self.steps, self.plan) as run_log,
            self.loader(self.train_data, self.start, self.steps) as loader,
        ):
            batches = iter(loader)
            while step < self.steps:
                border = min([self.steps, *((step // n + 1) * n for n in (every_eval, every_save) if n)])
                self._train(step, border, batches, loader, run_log)
                step = border
                if every_save and step % every_save == 0:
                    self.checkpointer.save(step, self.model, self.optimizer)
                if every_eval and step % every_eval == 0:
                    values, evaluated = self.evaluate(), step
                    run_log.evaluation(step, values)
                    if target and values["auroc"] >= target:
                        log.info("early stop at step %d: AUROC %.4f reached %.4f", step, values["auroc"], target)
                        break
            if evaluated != step:
                values = self.evaluate()
                run_log.evaluation(step, values)
            return run_log.summary(step, values)

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
                run_log.training(step, loss_sum, timer.take_ms(), loader.wait_s, self.learning_rate.factor(step - 1))
                loss_sum.zero_()

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Return loss, AUROC and NE over the held-out samples of all ranks, the same on every rank."""
        samples, b, world_size = self.held_out_data.num_samples, self.samples_per_rank, self.launch.world_size
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
            rank=self.launch.rank,
            world_size=self.launch.world_size,
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
