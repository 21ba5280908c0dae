"""A train pipeline whose steps are CUDA graphs: the CPU only copies batches in and launches a graph a step.

TorchRec's pipelines issue a step's kernels one by one and wait for numbers of ids; that takes the CPU longer than the
GPU needs for the step. Here nothing is read back. A step is captured twice, once for each of the two windows that steps
take in turn, and the two graphs are replayed alternately:

    copy stream     copy batch i + 2 from the CPU --------------------------------------------
    ids' stream     send the ids of batch i + 1 ----
    lookup stream   lookup i ---
    main stream     bottom MLP | wait | head, loss | backward | dense optimizer | wait for rows
    update stream   sort ids i ----                       | rows, as gradients arrive ------

All that changes from step to step is in device memory: epochs and the number of the step, see `comm.counters`, and
learning rates. All communication of the step is in one order, see `comm.order`. On CPUs, and before the capture, the
same steps are taken one by one.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_overlap.comm.order import CommunicationOrder, Streams
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.functions import StoreOptions
from dlrm_overlap.dense.tensor_parallel import divided_layers
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_layout import BatchCapacity
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.train.explain import capture_blockers, explain, note_why_eager
from dlrm_overlap.train.graphs.capacity import CapacityTracker, PendingResult, RankConsensus
from dlrm_overlap.train.graphs.captured import GraphPair
from dlrm_overlap.train.graphs.dense_step import DenseStep, leave_ddp
from dlrm_overlap.train.graphs.input_prefetcher import InputPrefetcher
from dlrm_overlap.train.graphs.model_collectives import ModelCollectives
from dlrm_overlap.train.graphs.room_probe import RoomProbe
from dlrm_overlap.train.graphs.static_batch import BatchTensors, on_device, why_not_static, with_even_batches_of

log = logging.getLogger("dlrm_overlap")

_DENSE_REDUCE = ("auto", "collective", "stores")
_WARMUP_STEPS = 3  # before a capture: they compile kernels, fill caches and learn which parameters get a gradient
_UNCAPTURABLE_STEPS = 3  # one after the other, until the next batch is taken for the first of others like it
_WORTH = 100  # replays, after which a capture was worth its time


class GraphTrainPipeline(TrainPipeline[Any, Any]):
    """Trains a TorchRec model like `TrainPipelineSparseDist`, with each step as a CUDA graph.

    The model must be sharded by our sharder. It is taken out of DDP: this pipeline averages the dense gradients itself,
    and starts all ranks from rank 0's dense weights. Every step must give a gradient to the same dense parameters. If
    pipelines share a model, only the one that is training holds CUDA graphs. A model that cannot be captured is trained
    by `TrainPipelineSparseDist`.

    A graph is valid for batches like the first one, with at most `capacity` ids. Other batches are trained eagerly, and
    the capacity grows if a batch exceeds it.

    Example:
        pipeline = GraphTrainPipeline(model, optimizer, device)
        for _ in range(steps):
            output = pipeline.progress(batches)
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
        capture: bool | None = None,
        bound: BatchCapacity | None = None,
        **torchrec_kwargs: Any,
    ) -> None:
        """Take the arguments of `TrainPipelineSparseDist`, by position or name, and those of captured steps.

        TorchRec's `custom_model_fwd` and `dmp_collection_sync_interval_batches` keep their meaning. Its options about
        how a step is issued, such as `apply_jit`, apply only when this pipeline falls back to TorchRec's, e.g. with
        `execute_all_batches=False`.

        Args:
            capacity: sizes of the largest batch, for which memory is allocated; None learns them from the first batch.
            group: the model's ranks; None is the default group.
            casts: gives the model its weights in bfloat16, if it does; made of all dense parameters that it trains.
            gradient_dtype: type in which dense gradients are sent, float32 or bfloat16.
            dense_reduce: how dense gradients are summed: collective (`dense.gradients`), stores (`dense.stores`), or
                auto, which is stores between GPUs where all ranks are on one node.
            capture: whether to capture; None captures on GPUs.
            bound: deprecated name of `capacity`.

        Raises:
            InputError: if `dense_reduce` is not known, or stores are asked of a CPU.
        """
        if dense_reduce not in _DENSE_REDUCE or (dense_reduce == "stores" and device.type != "cuda"):
            raise InputError(
                f"dense_reduce: {dense_reduce!r} on {device} must be auto, collective or, on GPUs, stores; leave it out"
            )
        if bound is not None:
            warnings.warn("GraphTrainPipeline: bound is deprecated; use capacity", FutureWarning, stacklevel=2)
            capacity = capacity or bound
        arguments = model, optimizer, device, *torchrec_args
        given = signature(TrainPipelineSparseDist).bind(*arguments, **torchrec_kwargs)
        given.apply_defaults()
        self._model, self._device, self._optimizer = model, device, optimizer
        self._modules = [each for each in model.modules() if isinstance(each, ExchangingModule)]
        self._fallback: TrainPipelineSparseDist[Any, Any] | None = None
        if self._modules and dist.get_rank(group) == 0 and log.isEnabledFor(logging.INFO):
            log.info("tables:\n%s", explain(model, optimizer=optimizer))
        reason = capture_blockers(model)
        if reason is None and not given.arguments["execute_all_batches"]:
            reason = "execute_all_batches is False"
        self._given, self._is_first = given, dist.get_rank(group) == 0
        if reason is not None:
            self._fall_back(reason)
            return
        self._model_fwd = given.arguments["custom_model_fwd"] or model
        self._captures = device.type == "cuda" if capture is None else capture
        ranks = group or dist.group.WORLD
        assert ranks is not None, "the process group is made before the pipeline"
        self._group, self._casts = ranks, casts
        self._gradient_dtype, self._dense_reduce = gradient_dtype, dense_reduce
        self._order = CommunicationOrder()
        self._streams = Streams(device)
        self._agreement = RankConsensus(ranks, self.check, device)
        self._capacity = CapacityTracker(capacity, self._agreement, self._modules, device)
        self._ahead = InputPrefetcher(self._modules, device, self._capacity, self._streams, self._order)
        self._patience = _UNCAPTURABLE_STEPS  # doubled where graphs are released too soon
        self._ignores_room = False  # whether the model is known to read no room behind ids of captured steps
        self._has_looked = False
        """whether a first batch has been read"""
        self._replicas = model if isinstance(model, DMPCollection) else None
        self._sync_interval = given.arguments["dmp_collection_sync_interval_batches"]
        self._steps = 0

    def _fall_back(self, reason: str) -> None:
        """Leave all steps to TorchRec's pipeline."""
        if self._is_first:
            log.warning("train pipeline: TorchRec's, since the step cannot be captured: %s", reason)
        if (before := _holder(self._model)) is not None:
            before._let_go()
        if isinstance(self._model, DistributedModelParallel):
            self._model.init_data_parallel()  # does nothing to a model that has been wrapped before
        self._fallback = TrainPipelineSparseDist(*self._given.args, **self._given.kwargs)

    def _look_at_first(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Fall back if the first batch of some rank is none that a captured step can read; a collective.

        Returns:
            An iterator of the same batches.
        """
        self._has_looked = True
        first = next(batches, None)
        reason = why_not_static(first)
        if self._agreement.any_is(reason is not None):
            self._fall_back(reason or "another rank's batch has tensors that no memory at fixed addresses can hold")
        return batches if first is None else chain([first], batches)

    @torch.inference_mode(False)  # parameters that an evaluation moves are trained, too
    def _open(self) -> None:
        """Take the model over, from the pipeline that had it before if there is one; a collective."""
        if (before := _holder(self._model)) is not None:
            before._let_go()
        leave_ddp(self._model)
        for layer in divided_layers(self._model):
            layer.products.order = self._order
        exchanges, group = self._ahead.exchanges, self._group
        # Where all exchanges store to all ranks, dense gradients can be stored there as well.
        reached = self._device.type == "cuda" and all(len(each.reach.here) == group.size() for each in exchanges)
        by_stores = self._dense_reduce == "stores" or (self._dense_reduce == "auto" and reached)
        timeout_s = min(exchange.options.wait_timeout_s for exchange in exchanges)
        stores = StoreOptions(wait_timeout_s=timeout_s) if by_stores else None
        self._opened, about = self._optimizer, (self._casts, group, self._order, self._gradient_dtype, stores)
        self._dense = DenseStep(self._model, self._opened, *about)
        if self._captures and self._dense.why_after and group.rank() == 0:
            log.warning("train pipeline: a dense optimizer steps after the graph: %s", self._dense.why_after)
        self._graphs = GraphPair(self._ahead, self._dense, self._order, self._device)
        self._warmup_steps = self._uncapturable_steps = self._replays = 0
        self._has_stepped = False
        self._learning_rates: list[Any] = []
        setattr(self._model, _HOLDER, self)

    def _let_go(self) -> None:
        """Leave the model as it was, to another pipeline, or to this one once more."""
        self._graphs.release()
        self._ahead.forget_sent_ids()
        self._dense.close()
        setattr(self._model, _HOLDER, None)

    def reset(self) -> None:
        """Forget batches that were read and not trained on: the next `progress` begins with a batch of its iterator."""
        (self._fallback or self._ahead).reset()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on the next batch, or evaluate it if the model is in evaluation mode, and return the model's output.

        In training it is valid until the next call.

        Raises:
            StopIteration: if there is no batch left.
            InputError: if a batch has other features than the first one, if other dense parameters get a
                gradient than in the first step, or if rows or windows were moved or given back since a capture.
            RuntimeError: that kernels have recorded, such as of a wait for a peer that has expired.
        """
        if self._fallback is None and not self._has_looked:
            dataloader_iter = self._look_at_first(dataloader_iter)
        if self._fallback is not None:
            self._fallback._optimizer = self._optimizer
            return self._fallback.progress(dataloader_iter)
        try:
            self.check()
            with self._streams.main():
                # TorchRec's `GradientAccumulationWrapper` puts another optimizer in the stead of the one given.
                holder = _holder(self._model)
                is_ready = holder is self and self._optimizer is self._opened
                if holder is None or (self._model.training and not is_ready):
                    self._open()
                return self._train(dataloader_iter) if self._model.training else self._evaluate(dataloader_iter)
        except RuntimeError:
            self.check()  # where a kernel has stopped the GPU, its record says why
            raise

    def check(self) -> None:
        """Raise the errors that kernels have recorded; never waits for the device."""
        if self._device.type == "cpu":
            return  # where a wait raises its own error
        for module in self._modules:
            if module.exchange is not None:
                module.exchange.check()
        if _holder(self._model) is self:
            self._dense.buckets.check()

    def close(self) -> None:
        """Give back the graphs, and memory that peers see, once all ranks are through with their steps; a collective.

        Graphs that hold collectives of NCCL must be gone before the process group.

        Raises:
            RuntimeError: that kernels have recorded.
        """
        try:
            if self._fallback is None and all(exchange.failure is None for exchange in self._ahead.exchanges):
                self._agreement.any_is(False)  # no rank gives its windows back while another reads them
            if _holder(self._model) is self:
                self._let_go()
            for exchange in exchanges(self._model):
                exchange.close()
        except RuntimeError:
            self.check()
            raise

    def detach(self) -> DistributedModelParallel:
        """Return the model for forwards of its own, within the bound, until the next `progress`; read batches stay."""
        if self._fallback is not None:
            return cast(DistributedModelParallel, self._fallback.detach())
        self._ahead.forget_sent_ids()
        return self._model

    def attach(self, model: DistributedModelParallel | None = None, sparse_dist: bool = True) -> None:
        """Undo `detach`, as the next `progress` does by itself."""
        if self._fallback is not None:
            self._fallback.attach(model, sparse_dist)

    def _evaluate(self, batches: Iterator[Any]) -> Any:
        training = _holder(self._model)
        if training._ahead.ids_are_sent:
            training._ahead.forget_sent_ids()  # of the training batch that comes next; they are sent again
        batch = BatchTensors(next(batches))
        if any(module.takes_ids for module in self._modules):  # else they take batches of features as they are
            batch = with_even_batches_of(batch.batch, self._ahead.unpooled_features)
        if training._steps and training._capacity.describes(batch):
            with torch.inference_mode(False):  # training steps write to the windows that are made
                training._make_room(training._capacity.ask(training._capacity.describe(batch), batch.ids))
        _, output = self._model_fwd(on_device(batch.batch, self._device))
        return output

    def _train(self, batches: Iterator[Any]) -> Any:
        if any(self._graphs.each):
            self._graphs.check_places()
        buffer_index = self._steps % 2
        if self._ahead.find(buffer_index) is None:
            self._ahead.begin(batches, buffer_index)
            self._dense.cast_shadow()  # a checkpoint may have been loaded since the last step
        self._dense.clear()
        self._follow_learning_rates()
        output = (
            self._take_step(buffer_index)
            if self._ahead.is_captured(buffer_index)
            else self._take_uncapturable_step(buffer_index)
        )
        self._dense.update_after()
        if self._replicas is not None and self._sync_interval and self._steps % self._sync_interval == 0:
            self._replicas.sync()
        self._ahead.release(buffer_index)
        self._steps += 1
        if self._ahead.is_exhausted:
            self._ahead.forget_sent_ids()
        self._ahead.stage(batches, buffer_index)
        return output

    def _take_step(self, buffer_index: int) -> Any:
        self._uncapturable_steps = 0
        with self._ahead.steady():
            if not self._ahead.ids_are_sent:
                self._ahead.bring_back(buffer_index)
                self._graphs.align(buffer_index, self._has_stepped)
            # A replay leaves the ids that were sent ahead to the next replay: no eager step and no capture would find
            # them. So the graphs are replayed once there are both; the first is captured anew where a segment's end
            # came between. A replay need not know whether the next batch is captured, and does not wait for the ranks.
            graphs = self._graphs.each
            if (captured := graphs[buffer_index]) is not None and graphs[1 - buffer_index] is not None:
                self._ahead.ensure_staged(1 - buffer_index)
                self._replays += 1
                return self._launch(buffer_index, captured.replay)
            following = self._ahead.is_captured(1 - buffer_index)
            captures = self._captures and not self._ahead.made_in_model
            has_room = not self._capacity.capacity.known_lengths
            if not self._has_stepped:
                output = self._first_step(buffer_index, following)
            elif captures and has_room and not self._ignores_room:
                output = self._probe_step(buffer_index, following)
            elif captures and self._warmup_steps >= _WARMUP_STEPS and following:
                step = partial(self._step, buffer_index, following=True, exact=False)
                return self._launch(
                    buffer_index, partial(self._graphs.capture, buffer_index, step, self._streams.main_stream)
                )
            else:  # the last ones before a capture have its sizes
                output = self._step(buffer_index, following, exact=not captures)
            self._warmup_steps += 1
            return output

    def _first_step(self, buffer_index: int, following: bool) -> Any:
        """Take the first step, and learn which ids the model looks up, and which parameters get a gradient."""
        with self._ahead.finding_ids(), ModelCollectives() as collectives:
            loss, output = self._forward(self._ahead.batch(buffer_index))
            loss.backward()
        self._dense.update()
        self._has_stepped = True
        if self._captures and collectives.called:
            self._stay_eager(f"the model calls {collectives.called}")
        if following:
            self._ahead.activate(1 - buffer_index)
        return output

    def _probe_step(self, buffer_index: int, following: bool) -> Any:
        """Take an eager step, and learn whether the model reads the room behind the ids of captured ones."""
        batch = self._ahead.batch(buffer_index)
        probe = RoomProbe(self._model, self._modules, self._capacity.capacity, batch)
        with probe.recording():
            output = self._step(buffer_index, following, batch=batch)
        if reason := probe.why_reads_room(self._model_fwd, self._agreement.any_is):
            self._stay_eager(f"the model reads what is behind the ids of a captured step, or their number: {reason}")
        self._ignores_room = not reason
        return output

    def _stay_eager(self, reason: str) -> None:
        self._captures = False
        note_why_eager(self._model, reason)
        if self._agreement.is_first:
            log.warning("train pipeline: steps are eager: %s", reason)

    def _take_uncapturable_step(self, buffer_index: int) -> Any:
        """Take the step of a batch that no captured step takes, with its ids within it, on all ranks alike."""
        self._ahead.forget_sent_ids()
        self._uncapturable_steps += 1
        held = self._ahead.find(buffer_index)
        assert held is not None
        if not self._make_room(held.answer) and self._uncapturable_steps == self._patience:
            self._patience = _UNCAPTURABLE_STEPS if self._replays >= _WORTH else 2 * self._patience
            self._forget_captured()
            self._ahead.forget_places()
        if self._agreement.is_first and self._uncapturable_steps <= 1:  # the first of several
            log.info("train pipeline: step %d is eager, since a batch is unlike those of captured steps", self._steps)
        loss, output = self._forward(self._ahead.batch(buffer_index))
        self._backward(loss)
        self._streams.step_is_issued(1 - buffer_index)  # which reads where the next batch of its buffer_index lands
        return output

    def _make_room(self, answer: PendingResult) -> bool:
        """Let the bound grow to what all ranks bring, where that is beyond it; return whether it was."""
        if is_beyond := self._capacity.are_beyond(numbers := answer.wait()):
            self._forget_captured()
            self._ahead.make_room(numbers)
        return is_beyond

    def _forget_captured(self) -> None:
        """Forget the graphs, and capture others after some eager steps."""
        self._graphs.release()
        self._warmup_steps = self._uncapturable_steps = self._replays = 0
        self._ignores_room = False  # there may be room behind ids of other features

    def _launch(self, buffer_index: int, take: Callable[[], Any]) -> Any:
        """Take a captured step by numbers as they are now, between lookup and update of tables of TorchRec's."""
        self._dense.refresh()
        for exchange in self._ahead.exchanges:
            exchange.tables.read_again()
        stock = self._ahead.stock_tables(buffer_index)
        for tables, ids in stock:
            tables.look_up(ids)
        output = take()
        for tables, _ in stock:
            tables.update()
        return output

    def _step(self, buffer_index: int, following: bool, exact: bool = True, batch: Any = None) -> Any:
        """Issue the step on batch i, which is at `buffer_index`; with `following`, batch i + 1 is brought in beside it.

        Args:
            exact: whether there is no room behind ids, see `InputPrefetcher.batch`.
            batch: batch i, if it has been made.
        """
        batch = self._ahead.batch(buffer_index, exact) if batch is None else batch
        self._streams.fork_ids()
        loss, output = self._forward(batch)
        if following:  # whose ids take their turn among the waits here, and are found from the fork on
            with self._streams.ids():
                self._ahead.activate(1 - buffer_index)
        self._backward(loss)
        self._streams.join_ids()
        return output

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._dense.update()
        for exchange in self._ahead.exchanges:
            exchange.finish_rows()

    def _forward(self, batch: Any) -> tuple[torch.Tensor, Any]:
        self._dense.begin()
        losses, output = self._model_fwd(batch)
        return losses.sum(dim=0) if losses.dim() > 0 else losses, output

    def _follow_learning_rates(self) -> None:
        """Hand the learning rates of the rows on, where they may have changed since the last step."""
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if rates == self._learning_rates and not self._dense.why_after:
            return
        self._learning_rates = rates
        for fused in self._dense.fused:
            fused.step()  # which sets the learning rate of the rows
        for exchange in self._ahead.exchanges:
            exchange.follow_rules(capture=True)


_HOLDER = "_graph_train_pipeline"  # attribute of a model


def _holder(model: DistributedModelParallel) -> Any:
    """Return the pipeline that trains a model, of all that it has; None if none does."""
    return getattr(model, _HOLDER, None)
