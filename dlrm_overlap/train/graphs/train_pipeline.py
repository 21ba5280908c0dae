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
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_types import ShardedEmbeddingModule
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipeline
from torchrec.optim.keyed import KeyedOptimizer

from dlrm_overlap.comm.order import CommunicationOrder, Streams
from dlrm_overlap.config import InputError
from dlrm_overlap.dense.cast import CastWeights
from dlrm_overlap.dense.flat import FlatParameters
from dlrm_overlap.dense.gradients import StoreOptions
from dlrm_overlap.dense.tensor_parallel import divided_layers, shards_of
from dlrm_overlap.embedding.exchanging_module import ExchangingModule
from dlrm_overlap.embedding.id_layout import BatchBound
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.train.explain import explain
from dlrm_overlap.train.graphs.bounds import Agreement, DistinctCounts, LearntBound
from dlrm_overlap.train.graphs.capturable import (
    dense_parameters,
    frozen_parameters,
    leave_ddp,
    why_not_captured,
)
from dlrm_overlap.train.graphs.captured import GraphPair
from dlrm_overlap.train.graphs.dense_step import DenseStep
from dlrm_overlap.train.graphs.model_collectives import ModelCollectives
from dlrm_overlap.train.graphs.optimizers import dense_optimizers, fused_optimizers
from dlrm_overlap.train.graphs.read_ahead import ReadAhead
from dlrm_overlap.train.graphs.static_batch import on_device, with_even_batches_of

log = logging.getLogger("dlrm_overlap")

_DENSE_REDUCE = ("auto", "collective", "stores")
_WARMUP_STEPS = 3  # before a capture: they compile kernels, fill caches and learn which parameters get a gradient
_ODD_STEPS = 3  # one after the other, until the next batch is taken for the first of others like it


class GraphTrainPipeline(TrainPipeline[Any, Any]):
    """Trains a TorchRec model as `TrainPipelineSparseDist` does, by CUDA graphs.

    The model is a `DistributedModelParallel` under our sharder, whose forward returns (losses, output). It is taken out
    of DDP: this pipeline sums the dense gradients itself, and starts all ranks from rank 0's dense weights. Every step
    gives a gradient to the same dense parameters. Of several pipelines of one model the one that trains has its graphs.

    Steps are captured for batches like the first one, on each rank, with up to a bound of ids. The steps of others are
    taken eagerly, and the bound grows where they are beyond it. `TrainPipelineSparseDist` trains a model that cannot be
    captured, and the log has the reason once.

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
        *torchrecs: Any,
        bound: BatchBound | None = None,
        group: dist.ProcessGroup | None = None,
        casts: CastWeights | None = None,
        gradient_dtype: torch.dtype = torch.float32,
        dense_reduce: str = "auto",
        capture: bool | None = None,
        **stock: Any,
    ) -> None:
        """Take the arguments of `TrainPipelineSparseDist`, by position or name, and those of captured steps.

        Of TorchRec's, `execute_all_batches`, `custom_model_fwd` and `dmp_collection_sync_interval_batches` mean what
        they mean there. How TorchRec issues a step, as `apply_jit` says, counts where it does.

        Args:
            torchrecs: arguments of `TrainPipelineSparseDist` that follow the device.
            bound: of the batches at first; None learns it from the first one.
            group: the model's ranks; None is the default group.
            casts: gives the model its weights in bfloat16, if it does; made of all dense parameters that it trains.
            gradient_dtype: type in which dense gradients are sent, float32 or bfloat16.
            dense_reduce: how dense gradients are summed: collective (`dense.gradients`), stores (`dense.stores`), or
                auto, which is stores between GPUs where all ranks are on one host.
            capture: whether to capture; None captures on GPUs.
            stock: arguments of `TrainPipelineSparseDist`, by name.

        Raises:
            InputError: if `dense_reduce` or an argument of `stock` is not known, stores are asked of a CPU, or the
                model is no `DistributedModelParallel`.
        """
        if dense_reduce not in _DENSE_REDUCE:
            raise InputError(f"dense_reduce: {dense_reduce!r} must be one of {', '.join(_DENSE_REDUCE)}; leave it out")
        if dense_reduce == "stores" and device.type != "cuda":
            raise InputError(f"dense_reduce: stores are between GPUs, and the model is on {device}; leave it out")
        known = signature(TrainPipelineSparseDist)
        if unknown := sorted(stock.keys() - known.parameters.keys()):
            raise InputError(
                f"GraphTrainPipeline: {', '.join(unknown)} is no argument of it or of TrainPipelineSparseDist; leave "
                f"it out"
            )
        given = known.bind(model, optimizer, device, *torchrecs, **stock)
        given.apply_defaults()
        if not hasattr(model, "init_data_parallel"):
            what = f"{type(model).__name__} is no DistributedModelParallel"
            raise InputError(f"GraphTrainPipeline: {what}, and the model must be; wrap it in one")
        self._model, self._device, self._given = model, device, optimizer
        self._fallback: TrainPipelineSparseDist[Any, Any] | None = None
        sharded = any(isinstance(module, ShardedEmbeddingModule) for module in model.modules())
        if sharded and dist.get_rank(group) == 0 and log.isEnabledFor(logging.INFO):
            log.info("tables:\n%s", explain(model, optimizer=optimizer))
        if (reason := why_not_captured(model)) is not None:
            if dist.get_rank(group) == 0:
                log.warning("train pipeline: TorchRec's, since the step cannot be captured: %s", reason)
            model.init_data_parallel()  # does nothing to a model that has been wrapped before
            self._fallback = TrainPipelineSparseDist(*given.args, **given.kwargs)
            return
        self._model_fwd = given.arguments["custom_model_fwd"] or model
        self._execute_all_batches = given.arguments["execute_all_batches"]
        self._captures = device.type == "cuda" if capture is None else capture
        self._modules = [m for m in model.modules() if isinstance(m, ExchangingModule)]
        ranks = group or dist.group.WORLD
        assert ranks is not None, "the process group is made before the pipeline"
        self._group, self._casts = ranks, casts
        self._gradient_dtype, self._dense_reduce = gradient_dtype, dense_reduce
        self._order = CommunicationOrder()
        self._streams = Streams(device)
        self._agreement = Agreement(ranks, self.check, device)
        learnt = LearntBound(bound, self._agreement, DistinctCounts(self._modules, device))
        self._ahead = ReadAhead(self._modules, device, learnt, self._streams, self._order)
        self._replicas = model if isinstance(model, DMPCollection) else None
        self._sync_interval = given.arguments["dmp_collection_sync_interval_batches"]
        self._steps = 0
        if _holder(model) is None:
            self._open()

    @property
    def _optimizer(self) -> Any:
        """The optimizer, by TorchRec's name: its `GradientAccumulationWrapper` puts another one in its stead."""
        return self._given

    @_optimizer.setter
    def _optimizer(self, optimizer: Any) -> None:
        self._given = optimizer
        if self._fallback is not None:
            self._fallback._optimizer = optimizer
        elif self._has_model:
            self._let_go()

    @property
    def _has_model(self) -> bool:
        """Whether this one, of all pipelines of the model, is the one that trains it."""
        return _holder(self._model) is self

    def _open(self) -> None:
        """Take the model over, from the pipeline that had it before if there is one; a collective."""
        if (before := _holder(self._model)) is not None:
            before._let_go()
        leave_ddp(self._model)
        for layer in divided_layers(self._model):
            layer.products.order = self._order
        self._dense = self._open_dense_step()
        self._fused = [each for each in fused_optimizers(self._optimizer) if not self._dense.steps_after(each)]
        if self._captures and self._dense.why_after and self._group.rank() == 0:
            log.warning("train pipeline: a dense optimizer steps after the graph: %s", self._dense.why_after)
        self._graphs = GraphPair(self._ahead, self._dense, self._order, self._device)
        self._warmup_steps = self._odd_steps = 0
        self._has_stepped = False
        self._learning_rates: list[Any] = []
        setattr(self._model, _HOLDER, self)

    def _let_go(self) -> None:
        """Leave the model as it was, to another pipeline, or to this one once more."""
        self._graphs.release()
        self._ahead.forget_sent_ids()
        self._dense.close()
        setattr(self._model, _HOLDER, None)

    def _open_dense_step(self) -> DenseStep:
        """Return the step of the dense parameters, of which all ranks then have rank 0's; a collective."""
        trained, group = dense_parameters(self._model), self._group
        flat = self._casts.flat if self._casts is not None else FlatParameters(trained, shards_of(self._model))
        assert trained.keys() <= flat.named.keys(), "gradients of others would not be summed over the ranks"
        if group.size() > 1:
            for parameter in frozen_parameters(self._model):
                dist.broadcast(parameter.data, group=group, group_src=0)
        exchanges = self._ahead.exchanges
        # Where all exchanges store to all ranks, dense gradients can be stored there as well.
        reached = all(len(exchange.reach.here) == group.size() for exchange in exchanges) and flat.device.type == "cuda"
        by_stores = self._dense_reduce == "stores" or (self._dense_reduce == "auto" and reached)
        timeout_s = min(exchange.options.wait_timeout_s for exchange in exchanges)
        stores = StoreOptions(wait_timeout_s=timeout_s) if by_stores else None
        optimizers = dense_optimizers(self._optimizer)
        return DenseStep(optimizers, flat, self._casts, group, self._order, self._gradient_dtype, stores)

    def reset(self) -> None:
        """Forget batches that were read and not trained on: the next `progress` begins with a batch of its iterator."""
        if self._fallback is not None:
            self._fallback.reset()
            return
        self._ahead.reset()

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train on the next batch, or evaluate it if the model is in evaluation mode, and return the model's output.

        In training it is valid until the next call.

        Raises:
            StopIteration: if there is no batch left.
            InputError: if a batch has other tensors or features than the first one, if the forward returns no
                (losses, output), if other dense parameters get a gradient than in the first step, or if rows or windows
                were moved or given back since a capture.
            RuntimeError: that kernels have recorded, such as of a wait for a peer that has expired.
        """
        if self._fallback is not None:
            return self._fallback.progress(dataloader_iter)
        try:
            self.check()
            with self._streams.main():
                if _holder(self._model) is None or (self._model.training and not self._has_model):
                    self._open()
                return self._train(dataloader_iter) if self._model.training else self._evaluate(dataloader_iter)
        except RuntimeError:
            self.check()  # where a kernel has stopped the GPU, its record says why
            raise

    def check(self) -> None:
        """Raise the errors that kernels have recorded; never waits for the device."""
        if self._device.type == "cpu":
            return  # where a wait raises its own error
        for exchange in self._ahead.exchanges if self._fallback is None else exchanges(self._model):
            exchange.check()
        if self._fallback is None and self._has_model:
            self._dense.buckets.check()

    def close(self) -> None:
        """Give back the graphs, and memory that peers see, once all ranks are through with their steps; a collective.

        The end of the process does so, too. Graphs that hold collectives of NCCL must be gone before the process group.

        Raises:
            RuntimeError: that kernels have recorded.
        """
        try:
            if self._fallback is None and all(exchange.failure is None for exchange in self._ahead.exchanges):
                self._agreement.any_is(False)  # no rank gives its windows back while another reads them
            if self._fallback is None and self._has_model:
                self._let_go()
            for exchange in exchanges(self._model):
                exchange.close()
        except RuntimeError:
            self.check()
            raise

    def detach(self) -> DistributedModelParallel:
        """Return the model for forwards of its own, until the next `progress`, as TorchRec's pipelines do.

        Batches that were read stay. Their bags are within the bound of those that the pipeline has seen.
        """
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
        batch = with_even_batches_of(next(batches))
        with torch.inference_mode(False):  # training steps write to the windows that are made
            if training._steps and (beyond := training._ahead.evaluated_beyond(batch)) is not None:
                training._forget_captured()
                training._ahead.make_room(beyond)
        return self._call(on_device(batch.batch, self._device))[1]

    def _train(self, batches: Iterator[Any]) -> Any:
        if any(self._graphs.each):
            self._graphs.check_places()
        parity = self._steps % 2
        if not self._ahead.holds(parity):
            self._ahead.begin(batches, parity)
            self._dense.cast_shadow()  # a checkpoint may have been loaded since the last step
        if not self._execute_all_batches and not self._ahead.reads_on(batches, parity):
            raise StopIteration
        self._dense.clear()
        self._follow_learning_rates()
        output = self._take_step(parity) if self._ahead.is_captured(parity) else self._take_odd_step(parity)
        self._dense.update_after()
        if self._replicas is not None and self._sync_interval and self._steps % self._sync_interval == 0:
            self._replicas.sync()
        self._ahead.release(parity)
        self._steps += 1
        if self._ahead.is_exhausted:
            self._ahead.forget_sent_ids()
        self._ahead.land(batches, parity)
        return output

    def _take_step(self, parity: int) -> Any:
        self._odd_steps = 0
        with self._ahead.steady():
            if not self._ahead.ids_are_sent:
                self._ahead.bring_back(parity)
                self._graphs.align(parity, self._has_stepped)
            # A replay leaves the ids that were sent ahead to the next replay: no eager step and no capture would find
            # them. So the graphs are replayed once there are both; the first is captured anew where a segment's end
            # came between. A replay need not know whether the next batch is captured, and does not wait for the ranks.
            graphs = self._graphs.each
            if (captured := graphs[parity]) is not None and graphs[1 - parity] is not None:
                self._ahead.settle(1 - parity)
                return self._launch(parity, captured.replay)
            following = self._ahead.is_captured(1 - parity)
            captures = self._captures and not self._ahead.made_in_model
            if captures and self._warmup_steps >= _WARMUP_STEPS and following:
                return self._launch(parity, partial(self._capture_and_launch, parity))
            output = self._step(parity, following) if self._has_stepped else self._first_step(parity, following)
            self._warmup_steps += 1
            return output

    def _capture_and_launch(self, parity: int) -> Any:
        step = partial(self._step, parity, following=True)
        return self._graphs.capture(parity, step, self._streams.main_stream).launch()

    def _first_step(self, parity: int, following: bool) -> Any:
        """Take the first step, and learn which ids the model looks up, and which parameters get a gradient."""
        with self._ahead.finding_ids(), ModelCollectives() as collectives:
            loss, output = self._forward(self._ahead.batch(parity))
            loss.backward()
        self._dense.update()
        self._has_stepped = True
        if self._captures and collectives.called:
            self._captures = False
            if self._agreement.is_first:
                log.warning("train pipeline: steps are eager: the model calls %s", collectives.called)
        if following:
            self._ahead.bring_in(1 - parity)
        return output

    def _take_odd_step(self, parity: int) -> Any:
        """Take the step of a batch that no captured step takes, with its ids within it, on all ranks alike."""
        self._ahead.forget_sent_ids()
        self._odd_steps += 1
        if (beyond := self._ahead.beyond(parity)) is not None:
            self._forget_captured()
            self._ahead.make_room(beyond)
        elif self._odd_steps == _ODD_STEPS:
            self._forget_captured()
            self._ahead.forget_places()
        if self._agreement.is_first:
            log.info("train pipeline: step %d is eager, since a batch is unlike those of captured steps", self._steps)
        loss, output = self._forward(self._ahead.odd_batch(parity))
        self._backward(loss)
        self._streams.step_is_issued(1 - parity)  # which reads where the next batch of its parity lands
        return output

    def _forget_captured(self) -> None:
        """Forget the graphs, and capture others after some eager steps."""
        self._graphs.release()
        self._warmup_steps = self._odd_steps = 0

    def _launch(self, parity: int, take: Callable[[], Any]) -> Any:
        """Take a captured step by numbers as they are now, between lookup and update of tables of TorchRec's."""
        self._dense.refresh()
        for exchange in self._ahead.exchanges:
            exchange.tables.read_again()
        stock = self._ahead.stock_tables(parity)
        for tables, ids in stock:
            tables.look_up(ids)
        output = take()
        for tables, _ in stock:
            tables.update()
        return output

    def _step(self, parity: int, following: bool) -> Any:
        """Issue the step on batch i, which is at `parity`; with `following`, batch i + 1 is brought in beside it."""
        self._streams.fork_ids()
        loss, output = self._forward(self._ahead.batch(parity))
        if following:  # whose ids take their turn among the waits here, and are found from the fork on
            with self._streams.ids():
                self._ahead.bring_in(1 - parity)
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
        losses, output = self._call(batch)
        return losses.sum(dim=0) if losses.dim() > 0 else losses, output

    def _call(self, batch: Any) -> tuple[torch.Tensor, Any]:
        return losses_and_output(self._model_fwd(batch))

    def _follow_learning_rates(self) -> None:
        """Hand the learning rates of the rows on, where they have changed since the last step.

        Optimizers that step after the graph may hold some of the tables', and set those rates when they choose to.
        """
        rates = [group["lr"] for group in self._optimizer.param_groups]
        if rates == self._learning_rates and not self._dense.why_after:
            return
        self._learning_rates = rates
        for fused in self._fused:
            fused.step()  # which sets the learning rate of the rows
        for exchange in self._ahead.exchanges:
            exchange.follow_rules(capture=True)


_HOLDER = "_graph_train_pipeline"  # attribute of a model


def _holder(model: DistributedModelParallel) -> Any:
    """Return the pipeline that trains a model, of all that it has; None if none does."""
    return getattr(model, _HOLDER, None)


def losses_and_output(returned: Any) -> tuple[torch.Tensor, Any]:
    """Return the result of a model's forward, which TorchRec's pipelines take in this form.

    Raises:
        InputError: if it is anything else.
    """
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise InputError(
            f"GraphTrainPipeline: the model's forward returned a {type(returned).__name__}, but a train pipeline takes "
            f"(losses, output); return both, the output detached"
        )
    losses, output = returned
    return losses, output
