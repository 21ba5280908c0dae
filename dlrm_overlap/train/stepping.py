"""Training steps and evaluation on one rank."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint.checkpoint import cuts_of, with_id_rows
from dlrm_overlap.checkpoint.loading import load_weights
from dlrm_overlap.config import Config, InputError
from dlrm_overlap.data.batch import Batch, Dataset
from dlrm_overlap.data.loader import Loader
from dlrm_overlap.data.schema import table_keys
from dlrm_overlap.data.times import text_of, windows
from dlrm_overlap.dense.tensor_parallel import products_of
from dlrm_overlap.embedding.configured_sharders import build_sharders
from dlrm_overlap.embedding.id_tables.rules import rows_of_tables
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.launching.launcher import World
from dlrm_overlap.launching.watch import Progress
from dlrm_overlap.observe.metrics import evaluation_metrics, gather_predictions
from dlrm_overlap.torchrec_private import EmbeddingFusedOptimizer
from dlrm_overlap.torchrec_private.attributes import tbe_of
from dlrm_overlap.torchrec_private.fbgemm import counts
from dlrm_overlap.train.assembly import ChangeModel, LearningRate, MakeSharders, assemble
from dlrm_overlap.train.graphs.dense_step import fused_optimizers
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline


def total_steps(config: Config, train: Dataset, world_size: int) -> int:
    """Return `train.steps` or, without it, the number of complete global batches in the configured epochs."""
    batch = config.train.samples_per_rank(world_size) * world_size
    return config.train.steps or config.train.epochs * (train.num_samples or 0) // batch


def check_batch_size(config: Config, train: Dataset, world_size: int) -> None:
    """Raise an `InputError` if the data set to train on is smaller than one global batch."""
    batch = config.train.samples_per_rank(world_size) * world_size
    if train.num_samples is not None and train.num_samples < batch:
        raise InputError(
            f"train.batch_size: a global batch of {batch} samples is more than the {train.num_samples} there are to "
            f"train on; take a smaller one"
        )


class EvaluationEndedError(Exception):
    """On all ranks: an evaluation was asked to end before it had seen all samples."""


@runtime_checkable
class PeerMemoryOwner(Protocol):
    """Has memory that peers access, which `close` frees once no rank is in a step."""

    def check(self) -> None:
        """Raise the errors that kernels have recorded."""

    def close(self) -> None: ...


class StepRunner:
    """One rank's model and data. All ranks call the same methods in the same order."""

    def __init__(
        self,
        config: Config,
        world: World,
        device: torch.device,
        train: Dataset,
        held_out: Dataset,
        make_sharders: MakeSharders = build_sharders,
        progress: Progress | None = None,
        id_rows: list[int] | None = None,
        change_model: ChangeModel | None = None,
    ) -> None:
        """Build the model and its pipeline; a collective.

        `id_rows` has the rows of each table of any id, if they differ from `config`.
        """
        self.progress = progress or Progress()
        self.config, self.world, self.device = config, world, device
        self.train_data, self.held_out_data = train, held_out
        self.samples_per_rank = config.train.samples_per_rank(world.world_size)
        self.global_batch = self.samples_per_rank * world.world_size
        self.steps = total_steps(config, train, world.world_size)
        torch.set_float32_matmul_precision("high" if config.train.precision == "tf32" else "highest")
        self._make_sharders, self._change_model = make_sharders, change_model
        self._build(id_rows)
        self.predictions: list[torch.Tensor] = []
        """logits and labels of this rank's last step, valid until the next"""
        self.window_metrics: dict[str, dict[str, float]] = {}
        """begin of each window (data.eval_window) -> its number of samples and metrics in the last `evaluate`"""

    def _build(self, id_rows: list[int] | None) -> None:
        config = self.config if id_rows is None else with_id_rows(self.config, id_rows)
        about = self._make_sharders, self._change_model
        assembled = assemble(config, self.world, self.device, self.train_data, *about)
        self.model, self.optimizer, self.pipeline, self.plan, self.embedding = assembled
        self.learning_rate = LearningRate(self.optimizer, config.train)
        given, ranks = self.train_data.rows, self.world.world_size
        rows = zip(table_keys(len(given)), given, rows_of_tables(given, config.embedding.id_tables, ranks), strict=True)
        self.id_rows = {name: count for name, known, count in rows if known is None}
        """table of any id -> its rows"""

    @contextmanager
    def raising_kernel_errors(self) -> Iterator[None]:
        """In the context, replace CUDA's error, which only says that the GPU stopped, by what a kernel recorded."""
        try:
            yield
        except RuntimeError:
            self.check()
            raise

    def step(self, batches: Iterator[Batch]) -> torch.Tensor:
        """Take a training step on the next batch and return this rank's mean loss [], on the device; a collective."""
        with self.raising_kernel_errors():
            loss, *self.predictions = self.pipeline.progress(batches)
        return loss

    def gather_dense(self) -> None:
        """Make the dense weights and optimizer states the same on all ranks before they are read; a collective."""
        if isinstance(self.pipeline, GraphTrainPipeline):
            self.pipeline.gather_dense()

    def evaluate(self, ends: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return the `evaluation_metrics` of all ranks' held-out samples, bit-identical on every rank; a collective.

        Args:
            ends: called after every `log.every` batches; True, on all ranks, ends the evaluation.

        Raises:
            EvaluationEndedError: if it was ended before its last batch.
        """
        samples = self.held_out_data.num_samples
        assert samples is not None, "an endless data set cannot be evaluated"
        return self._evaluate_on(math.ceil(samples / self.global_batch), ends, by_window=True)

    def evaluate_checkpoint(self, checkpoint: Path) -> dict[str, float]:
        """Load the weights of a complete checkpoint, then `evaluate`; a collective.

        Raises:
            InputError: if the checkpoint lacks a tensor of this model.
        """
        with self.raising_kernel_errors():
            load_weights(checkpoint, self.model, cuts_of(self.model), self.progress.tick)
            values = self.evaluate()
        self.check()
        return values

    @torch.no_grad()
    def _evaluate_on(
        self, steps: int, ends: Callable[[], bool] = lambda: False, by_window: bool = False
    ) -> dict[str, float]:
        samples = self.held_out_data.num_samples
        logits, labels = [], []
        self.model.eval()
        self.pipeline.reset()
        with self.loader(self.held_out_data, 0, steps, workers=0 if steps == 1 else None) as loader:
            batches = iter(loader)
            while len(logits) < steps:
                self.progress.tick()
                _, batch_logits, batch_labels = self.pipeline.progress(batches)
                logits.append(batch_logits)
                labels.append(batch_labels)
                if len(logits) % self.config.log.every == 0 and ends():
                    break
        self.model.train()
        self._subtract_forwards(len(logits))
        if len(logits) < steps:
            self.pipeline.reset()
            raise EvaluationEndedError
        gathered = gather_predictions(torch.cat(logits), torch.cat(labels), self.samples_per_rank)
        # The last global batch is filled up with repeated samples.
        logits, labels = (each[:samples] for each in gathered)
        weights = self.held_out_data.labels
        values = evaluation_metrics(logits, labels, list(weights), list(weights.values()))
        if by_window and (window := self.config.data.eval_window):
            times = self.held_out_data.times(0, samples or 0)
            assert times is not None, "checked when the samples were opened"
            for begin, found in windows(times, window):
                part = torch.from_numpy(found).to(logits.device)
                metrics = evaluation_metrics(logits[part], labels[part], list(weights), list(weights.values()))
                self.window_metrics[text_of(begin, window)] = {"samples": len(found), **metrics}
        # Every rank must take the same decision about an early stop.
        shared = torch.tensor(list(values.values()), dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return dict(zip(values, shared.tolist(), strict=True))

    def _subtract_forwards(self, forwards: int) -> None:
        """Subtract evaluation forwards from FBGEMM's step counts, on which Adam's bias correction depends."""
        fused = fused_optimizers(self.optimizer)
        for tbe in {tbe_of(each) for each in fused if isinstance(each, EmbeddingFusedOptimizer)}:
            if counts(tbe):
                tbe.iter.sub_(forwards)
                tbe.iter_cpu.sub_(forwards)
        for exchange in exchanges(self.model):
            exchange.follow_rules()

    def loader(self, dataset: Dataset, first_step: int, last_step: int, workers: int | None = None) -> Loader:
        """Return a loader of this rank's share of the global batches [first_step, last_step), one per step."""
        data = self.config.data
        return Loader(
            dataset,
            batch_size=self.samples_per_rank,
            rank=self.world.rank,
            world_size=self.world.world_size,
            steps=range(first_step, last_step),
            workers=data.workers if workers is None else workers,
            prefetch=data.prefetch,
            pin_memory=self.device.type == "cuda",
            # Shorter than a peer's wait for this rank, so that the cause is reported.
            timeout_s=0.8 * self.config.embedding.wait_timeout_s,
        )

    def _peer_memory_owners(self) -> list[PeerMemoryOwner]:
        pipelines = [self.pipeline] if isinstance(self.pipeline, PeerMemoryOwner) else []
        return [*pipelines, *products_of(self.model), *exchanges(self.model)]

    def check(self) -> None:
        for owner in self._peer_memory_owners():
            owner.check()

    def close(self) -> None:
        """Release memory that peers access, which garbage collection does not release; no rank may be in a step."""
        for owner in self._peer_memory_owners():
            owner.close()
