"""A train pipeline whose steps are CUDA graphs, as docs/architecture/step.md explains."""

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_overlap.comm.order import CommunicationOrder, Streams
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.functions import StoreOptions, store_options
from dlrm_overlap.dense.tensor_parallel import divided_layers
from dlrm_overlap.embedding.capacity import CapacityTracker, RankConsensus
from dlrm_overlap.embedding.exchanging_module import ExchangingModule, exchanges_of
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.torchrec_private.attributes import has_left_ddp, leave_ddp, return_to_ddp, set_optimizer
from dlrm_overlap.train.explain import capture_blockers, explain, note_why_eager
from dlrm_overlap.train.graphs.captured import GraphPair
from dlrm_overlap.train.graphs.dense_step import DenseStep, dense_parameters
from dlrm_overlap.train.graphs.input_prefetcher import InputPrefetcher, PlannedStep, StepKind
from dlrm_overlap.train.graphs.model_collectives import ModelCollectives
from dlrm_overlap.train.graphs.model_ids import ModelIds
from dlrm_overlap.train.graphs.model_owner import owner_of, set_owner
from dlrm_overlap.train.graphs.padding_probe import PaddingProbe
from dlrm_overlap.train.graphs.static_batch import BatchTensors, on_device, why_not_static, with_even_batches_of

log = logging.getLogger("dlrm_overlap")

_DENSE_REDUCE = ("auto", "collective", "stores")
_DENSE_UPDATE = ("auto", "all", "owner", "owner_deferred")
_GRADIENT_DTYPES = (torch.float32, torch.bfloat16)
# Eager steps before a capture, which compile kernels, fill caches and find out which parameters get a gradient.
_WARMUP_STEPS = 3
# Uncapturable batches in a row, after which steps are captured for batches like the next one.
_UNCAPTURABLE_STEPS = 3
# A capture that was replayed this often was worth its time.
_WORTHWHILE_REPLAYS = 100


class GraphTrainPipeline(TrainPipeline[Any, Any]):
    """Trains a TorchRec model like `TrainPipelineSparseDist`, with each step as a CUDA graph.

    The model must be sharded by our sharder. Until `close` it is out of DDP: this pipeline averages the dense gradients
    itself, and starts all ranks from rank 0's dense weights. Every step must give a gradient to the same dense
    parameters. If pipelines share a model, only the one that is training holds CUDA graphs. A model that cannot be
    captured is trained by `TrainPipelineSparseDist`.

    Graphs are valid for batches like the first one, within `capacity`. Other batches are trained eagerly, and the
    capacity grows if a batch exceeds it.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        optimizer: torch.optim.Optimizer | KeyedOptimizer,
        device: torch.device,
        *torchrec_args: Any,
        capacity: BatchCapacity | None = None,
        group: dist.ProcessGroup | None = None,
        casts: CastWeights | None = None,
        gradient_dtype: torch.dtype = torch.float32,
        dense_reduce: str = "auto",
        dense_update: str = "all",
        capture: bool | None = None,
        bound: BatchCapacity | None = None,
        **torchrec_kwargs: Any,
    ) -> None:
        """Take the arguments of `TrainPipelineSparseDist`, by position or name, and arguments for captured steps.

        TorchRec's `custom_model_fwd` and `dmp_collection_sync_interval_batches` keep their meaning. Its options about
        how a step is issued, such as `apply_jit`, apply only when this pipeline falls back to TorchRec's, e.g. with
        `execute_all_batches=False`.

        Args:
            capacity: sizes of the largest batch, for which memory is allocated; None learns them from the first batch.
            casts: casts all trained dense parameters to bfloat16 for the model; None if it uses them in float32.
            group: process group of all ranks that train the model; None takes the default one.
            gradient_dtype: type in which dense gradients are sent, float32 or bfloat16.
            dense_reduce: how dense gradients are averaged: collective (`dense.gradients`), stores (`dense.stores`), or
                auto, which is stores on GPUs if all ranks are on one node.
            dense_update: which ranks update a dense weight: all, or its owner, which then stores it at all ranks as
                bfloat16. With owner, a rank's float32 weights and optimizer states are out of date after a step, until
                `gather_dense`, and gradients are the rank's own. It needs `casts`, stores, no clipping, and a single
                optimizer, which is captured; else all do, with a warning. owner_deferred is owner, but a step updates
                the last bucket of the step before, while it looks up rows. With auto it is owner where possible.
            capture: True to capture steps; None captures on GPUs.
            bound: deprecated name of `capacity`.

        Raises:
            InputError: if an argument has a value or a type other than these, or `dense_reduce` is stores on a CPU.
        """
        if dense_reduce not in _DENSE_REDUCE or (dense_reduce == "stores" and device.type != "cuda"):
            raise InputError(
                f"dense_reduce: {dense_reduce!r} on {device} must be auto, collective or, on GPUs, stores; leave it out"
            )
        if dense_update not in _DENSE_UPDATE:
            raise InputError(f"dense_update: {dense_update!r} must be auto, all, owner or owner_deferred; leave it out")
        if bound is not None:
            warnings.warn("GraphTrainPipeline: bound is deprecated; use capacity", FutureWarning, stacklevel=2)
            capacity = capacity or bound
        if capacity is not None and not isinstance(capacity, BatchCapacity):
            raise InputError(f"capacity: {capacity!r} must be a BatchCapacity; leave it out to learn it")
        if casts is not None and not isinstance(casts, CastWeights):
            raise InputError(f"casts: {casts!r} must be a CastWeights; leave it out and use torch.autocast")
        if gradient_dtype not in _GRADIENT_DTYPES:
            raise InputError(
                f"gradient_dtype: {gradient_dtype!r} must be torch.float32 or torch.bfloat16; leave it out"
            )
        arguments = model, optimizer, device, *torchrec_args
        given = signature(TrainPipelineSparseDist).bind(*arguments, **torchrec_kwargs)
        given.apply_defaults()
        self._model, self._device, self._optimizer = model, device, optimizer
        self._captures = device.type == "cuda" if capture is None else capture
        self._modules = [each for each in model.modules() if isinstance(each, ExchangingModule)]
        self._fallback: TrainPipelineSparseDist[Any, Any] | None = None
        self._is_first = dist.get_rank(group) == 0
        if self._modules and self._is_first and log.isEnabledFor(logging.INFO):
            where = "" if self._captures else f" (on {device.type} no step is captured)"
            log.info("tables%s:\n%s", where, explain(model, optimizer=optimizer))
        reason = capture_blockers(model)
        if reason is None and not given.arguments["execute_all_batches"]:
            reason = "execute_all_batches is False"
        self._given = given
        if reason is not None:
            self._fall_back(reason)
            return
        self._model_fwd = given.arguments["custom_model_fwd"] or model
        ranks = group or dist.group.WORLD
        assert ranks is not None, "the process group is made before the pipeline"
        self._group, self._casts = ranks, casts
        self._gradient_dtype, self._dense_reduce = gradient_dtype, dense_reduce
        self._dense_update = dense_update
        self._order = CommunicationOrder()
        self._streams = Streams(device)
        self._consensus = RankConsensus(ranks, self.check, device)
        self._capacity = CapacityTracker(capacity, self._consensus, self._modules, device)
        self._ids = ModelIds(self._modules, self._order)
        self._prefetcher = InputPrefetcher(device, self._capacity, self._streams, self._ids)
        self._patience = _UNCAPTURABLE_STEPS
        """uncapturable batches in a row after which the graphs are released; doubled if they were released too early"""
        self._ignores_padding = False
        """True once the model is known not to read the padding of captured steps"""
        self._has_checked_first = False
        self._replicas = model if isinstance(model, DMPCollection) else None
        self._sync_interval = given.arguments["dmp_collection_sync_interval_batches"]
        self._steps = 0

    def _fall_back(self, reason: str) -> None:
        if self._is_first:
            log.warning("train pipeline: TorchRec's, since the step cannot be captured: %s", reason)
        if (before := owner_of(self._model)) is not None:
            before.release_model()
        if isinstance(self._model, DistributedModelParallel):
            self._model.init_data_parallel()  # does nothing if the model is in DDP already
        self._fallback = TrainPipelineSparseDist(*self._given.args, **self._given.kwargs)

    def _check_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Fall back to TorchRec's pipeline if the first batch of some rank cannot be captured; a collective."""
        self._has_checked_first = True
        first = next(batches, None)
        reason = why_not_static(first)
        if self._consensus.any_is(reason is not None):
            self._fall_back(reason or "another rank's batch has tensors that no memory at fixed addresses can hold")
        return batches if first is None else chain([first], batches)

    @torch.inference_mode(False)  # an evaluation may call this, and the parameters are trained later
    def _open(self) -> None:
        """Become the owner of the model; a collective."""
        if (before := owner_of(self._model)) is not None:
            before.release_model()
        leave_ddp(self._model)
        for layer in divided_layers(self._model):
            layer.products.order = self._order
        exchanges, group = exchanges_of(self._modules), self._group
        reaches_all = all(len(each.reach.here) == group.size() for each in exchanges)
        timeouts_s = [each.options.wait_timeout_s for each in exchanges]
        wait_timeout_s = min(timeouts_s, default=StoreOptions().wait_timeout_s)
        stores = store_options(self._dense_reduce, self._device, reaches_all, wait_timeout_s)
        self._opened, about = self._optimizer, (self._casts, group, self._order, self._gradient_dtype, stores)
        self._dense = DenseStep(self._model, self._opened, *about, dense_update=self._dense_update)
        reason = self._dense.why_not_by_owners
        if self._dense_update.startswith("owner") and reason and group.size() > 1 and self._is_first:
            log.warning("dense_update: all instead of %s, since %s", self._dense_update, reason)
        if self._captures and self._dense.why_after and self._is_first:
            log.warning("train pipeline: a dense optimizer steps after the graph: %s", self._dense.why_after)
        self._graphs = GraphPair(self._modules, self._dense.buckets.counters, self._order, self._device)
        self._warmup_steps = self._uncapturable_steps = self._replays = 0
        self._has_stepped = False
        self._learning_rates: list[Any] = []
        if self._capacity.is_learned:
            self._prefetcher.make_windows()  # another pipeline may have made them for its capacity
        set_owner(self._model, self)

    def gather_dense(self) -> None:
        """Make the float32 dense weights and the optimizer's states the same on all ranks; a collective.

        Call it on all ranks before you read either, if `dense_update` is owner. `progress` does so when it evaluates
        or ends, and `detach` and `close` do.
        """
        if self._fallback is None and owner_of(self._model) is self:
            with self._streams.main():
                self._dense.gather()

    def release_model(self) -> None:
        """Let another pipeline train the model; a collective, unless an exchange has failed."""
        self._graphs.release()
        if all(exchange.failure is None for exchange in exchanges_of(self._modules)):
            self.gather_dense()
        self._ids.forget()
        self._dense.close()
        set_owner(self._model, None)

    def reset(self) -> None:
        (self._fallback or self._prefetcher).reset()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on the next batch, or evaluate it if the model is in evaluation mode, and return the model's output.

        A collective, which may wait for the other ranks. In training, the output is valid until the next call.

        Raises:
            StopIteration: if a rank has no batch left.
            InputError: if a batch has other features than the first one, if other dense parameters get a gradient than
                in the first step, or if rows of tables or windows were moved or freed, or tables frozen, since the
                capture, or if a tracker was registered since the pipeline was made.
            RuntimeError: if a kernel has recorded an error, such as an expired wait for a peer.
        """
        if self._fallback is None and not self._has_checked_first:
            dataloader_iter = self._check_first(dataloader_iter)
        if self._fallback is not None:
            set_optimizer(self._fallback, self._optimizer)
            return self._fallback.progress(dataloader_iter)
        try:
            self.check()
            with self._streams.main():
                # TorchRec's `GradientAccumulationWrapper` replaces the optimizer.
                owner = owner_of(self._model)
                is_ready = owner is self and self._optimizer is self._opened
                if owner is None or (self._model.training and not (is_ready and self._dense.trains_the_same())):
                    self._open()
                return self._train(dataloader_iter) if self._model.training else self._evaluate(dataloader_iter)
        except RuntimeError:
            self.check()  # the record of a kernel that has stopped the GPU says why
            raise

    def check(self) -> None:
        """Raise the errors that kernels have recorded; never waits for the device."""
        if self._device.type == "cpu":
            return  # a wait on a CPU raises its own error
        for module in self._modules:
            if module.exchange is not None:
                module.exchange.check()
        if owner_of(self._model) is self:
            self._dense.buckets.check()

    def close(self) -> None:
        """Free the graphs and the windows, once all ranks have finished their steps; a collective.

        A model that was in DDP before the first step is in DDP again, unless another pipeline trains it. Call this
        before the process group is destroyed. Raises a RuntimeError if a kernel has recorded an error.
        """
        has_failed = any(exchange.failure is not None for exchange in exchanges_of(self._modules))
        try:
            if self._fallback is None and not has_failed:
                self._consensus.any_is(False)  # no rank frees its windows while another reads them
            if owner_of(self._model) is self:
                self.release_model()
            for exchange in exchanges(self._model):
                exchange.close()
            is_free = has_left_ddp(self._model) and owner_of(self._model) is None and not has_failed
            if is_free and self._fallback is None and dense_parameters(self._model):
                self._consensus.any_is(False)  # notices if a rank has ended meanwhile
                return_to_ddp(self._model)
        except RuntimeError:
            self.check()
            raise

    def detach(self) -> DistributedModelParallel:
        """Return the model for calls on batches within the capacity, until the next `progress`.

        A collective with `dense_update` owner. Batches that were read ahead are kept.
        """
        if self._fallback is not None:
            return cast(DistributedModelParallel, self._fallback.detach())
        self.gather_dense()
        self._ids.forget()
        return self._model

    def attach(self, model: DistributedModelParallel | None = None, sparse_dist: bool = True) -> None:
        """Undo `detach`. The next `progress` also does this."""
        if self._fallback is not None:
            self._fallback.attach(model, sparse_dist)

    def _evaluate(self, batches: Iterator[Any]) -> Any:
        batch = BatchTensors(next(batches))
        if any(module.takes_ids for module in self._modules):
            batch = with_even_batches_of(batch.batch, self._ids.unpooled_features)
        owner = owner_of(self._model)
        assert owner is not None
        owner.gather_dense()
        owner.prepare_evaluation(batch)
        _, output = self._model_fwd(on_device(batch.batch, self._device))
        return output

    def prepare_evaluation(self, batch: BatchTensors) -> None:
        """Grow the capacity if the batch exceeds it; a collective. Ids sent ahead are sent again in their step."""
        if self._ids.are_sent:
            self._ids.forget()
        if self._steps and self._capacity.describes(batch):
            with torch.inference_mode(False):  # training steps write to the new windows, too
                self._grow(self._capacity.ask(self._capacity.describe(batch), batch.ids).wait())

    def _train(self, batches: Iterator[Any]) -> Any:
        if any(module.has_tracker for module in self._modules):
            raise InputError(
                "GraphTrainPipeline: a tracker was registered since the pipeline was made, whose steps would not call "
                "it; close this pipeline on all ranks and make another one"
            )
        self._graphs.check_unchanged()
        output = self._take_step(self._prefetcher.plan(batches))
        self._steps += 1
        # The step and its batch are freed by now: the loader may reuse the batch's memory for the next one.
        self._prefetcher.finish(batches)
        return output

    def _take_step(self, step: PlannedStep) -> Any:
        if step.kind is StepKind.END:
            self._dense.gather()
            raise StopIteration
        self._ids.follow_loads()
        for each in self._ids.id_tables:
            each.expect(is_taken=True)
            each.follow_clock()
        self._dense.adopt_weights()
        if step.is_first:
            self._dense.gather()
            self._dense.cast_shadow()  # a checkpoint may have been loaded since the last step
        self._dense.clear()
        self._follow_learning_rates()
        output = self._captured_step(step) if step.kind is StepKind.CAPTURED else self._eager_step(step)
        self._dense.update_after()
        if self._replicas is not None and self._sync_interval and self._steps % self._sync_interval == 0:
            self._replicas.sync()
        return output

    def _captured_step(self, step: PlannedStep) -> Any:
        self._uncapturable_steps = 0
        if self._ids.are_sent and not self._graphs.are_in_step(step.buffer_index):
            self._ids.forget()
        if not self._ids.are_sent:
            self._send_late(step)
        if self._ids.are_sent:
            self._ids.prepare_step()
        # The ids that a replay sends ahead can only be looked up by the next replay, not by an eager step or a capture.
        # So replays begin once both graphs are captured; if a segment ends in between, the first is captured again. A
        # replay need not know whether the next batch is captured, and does not wait for the ranks.
        captured = self._graphs.each[step.buffer_index]
        if captured is not None and self._graphs.are_captured:
            self._replays += 1
            if tables := self._ids.id_tables:  # a replay sends some batch's ids even if no captured step follows
                follows = self._prefetcher.plan_following().kind is StepKind.CAPTURED
                for each in tables:
                    each.expect(follows)
            return self._launch(step, captured.replay)
        with self._ids.steady():
            output = self._warmup_step(step, self._prefetcher.plan_following())
        self._warmup_steps += 1
        return output

    def _warmup_step(self, step: PlannedStep, following: PlannedStep) -> Any:
        captures = self._captures and not self._ids.block_capture
        is_padded = not self._capacity.capacity.known_lengths
        if not self._has_stepped:
            return self._first_step(step, following)
        if captures and is_padded and not self._ignores_padding:
            return self._probe_step(step, following)
        if captures and self._warmup_steps >= _WARMUP_STEPS and following.kind is StepKind.CAPTURED:
            issue = partial(self._step, step, following, exact=False)
            capture = partial(self._graphs.capture, step.buffer_index, issue, self._streams.main_stream)
            return self._launch(step, capture)
        return self._step(step, following, exact=not captures)  # padded before a capture, which has the same sizes

    def _send_late(self, step: PlannedStep) -> None:
        self._prefetcher.activate(step)
        if self._has_stepped:
            self._graphs.skip_epochs(step.buffer_index, [sender.exchange for sender, _ in self._ids.sent_ahead])
            with self._ids.steady():
                self._ids.send(step.active)
            self._graphs.set_arguments(step.buffer_index)

    def _activate(self, following: PlannedStep) -> None:
        if following.kind is StepKind.CAPTURED:
            self._prefetcher.activate(following)
            self._ids.send(following.active)

    def _first_step(self, step: PlannedStep, following: PlannedStep) -> Any:
        with self._ids.finding(step.active, self._capacity.capacity), ModelCollectives() as collectives:
            loss, output = self._forward(step.batch(self._device))
            loss.backward()
        self._dense.update()
        self._has_stepped = True
        if self._captures and collectives.called:
            self._stay_eager(f"the model calls {collectives.called}")
        self._activate(following)
        return output

    def _probe_step(self, step: PlannedStep, following: PlannedStep) -> Any:
        batch = step.batch(self._device)
        probe = PaddingProbe(self._model, self._modules, self._capacity.capacity, batch)
        with probe.recording():
            output = self._step(step, following, batch=batch)
        if reason := probe.why_padding_is_read(self._model_fwd, self._consensus.any_is):
            self._stay_eager(f"the model reads the padding after the ids of a captured step, or their number: {reason}")
        self._ignores_padding = not reason
        return output

    def _stay_eager(self, reason: str) -> None:
        self._captures = False
        note_why_eager(self._model, reason)
        if self._is_first:
            log.warning("train pipeline: steps are eager: %s", reason)

    def _eager_step(self, step: PlannedStep) -> Any:
        self._ids.forget()
        self._uncapturable_steps += 1
        if not self._grow(step.sizes) and self._uncapturable_steps == self._patience:
            self._patience = _UNCAPTURABLE_STEPS if self._replays >= _WORTHWHILE_REPLAYS else 2 * self._patience
            self._release_graphs()
            self._prefetcher.drop_buffers()
        if self._is_first and self._uncapturable_steps <= 1:
            log.info("train pipeline: step %d is eager, since a batch is unlike those of captured steps", self._steps)
        loss, output = self._forward(step.batch(self._device))
        self._backward(loss)
        return output

    def _grow(self, sizes: np.ndarray) -> bool:
        """Grow the capacity if `sizes` (`CapacityTracker`) exceed it; return whether they do."""
        if is_beyond := self._capacity.are_beyond(sizes):
            self._release_graphs()
            self._prefetcher.grow(sizes)
        return is_beyond

    def _release_graphs(self) -> None:
        self._graphs.release()
        self._warmup_steps = self._uncapturable_steps = self._replays = 0
        self._ignores_padding = False  # other features may be padded

    def _launch(self, step: PlannedStep, take: Callable[[], Any]) -> Any:
        """Take a captured step with the current learning rates, after the lookup and before the update of TorchRec's
        tables.
        """
        self._dense.refresh()
        for exchange in exchanges_of(self._modules):
            exchange.tables.read_again()
        torchrec = self._ids.torchrec_tables(step.active)
        for tables, ids in torchrec:
            tables.look_up(ids)
        output = take()
        for tables, _ in torchrec:
            tables.update()
        return output

    def _step(self, step: PlannedStep, following: PlannedStep, exact: bool = True, batch: Any = None) -> Any:
        """Issue a step and, concurrently, send the ids of the following one.

        `exact` is as in `PlannedStep.batch`; `batch` is the step's batch on the device, if there is one.
        """
        batch = step.batch(self._device, exact) if batch is None else batch
        self._streams.fork_ids()
        loss, output = self._forward(batch)
        # The GPU starts the ids' kernels at the fork. Issued here, they take their turn among the waits of the step.
        with self._streams.ids():
            self._activate(following)
        self._backward(loss)
        self._streams.join_ids()
        return output

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._dense.update()
        for exchange in exchanges_of(self._modules):
            exchange.finish_rows()

    def _forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        self._dense.begin()
        losses, output = self._model_fwd(batch)
        return losses.sum(dim=0) if losses.dim() > 0 else losses, output

    def _follow_learning_rates(self) -> None:
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if rates == self._learning_rates and not self._dense.why_after:
            return
        self._learning_rates = rates
        for fused in self._dense.fused:
            fused.step()  # sets the learning rate of the rows
        for exchange in exchanges_of(self._modules):
            exchange.follow_rules(capture=True)
