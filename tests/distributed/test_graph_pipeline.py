"""GraphTrainPipeline trains as TorchRec's pipeline does, bit for bit, eager or by a stand-in for CUDA graphs."""

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap import profile_steps
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.config import Config
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding.exchange import Exchange
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.kernels.compiled import INTERPRETED
from dlrm_overlap.train.graphs.dense_step import dense_parameters
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from dlrm_overlap.train.model import DLRM
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import LOSS_TOLERANCE, assert_all_near, assert_near, assert_same
from tests.conftest import refuses
from tests.distributed.captured import captures
from tests.distributed.models import CPU, SUM, Model, local_tensors, make_plan, train
from tests.distributed.workers import cases_on_ranks, make_trainer, quickstart

SAMPLES = 16
SHAPE = ["--train.batch_size", str(SAMPLES), "--train.steps", "100", "--data.eval_samples", "80"]
SHAPE += ["--model.dim", "8", "--model.bottom_mlp", "[16,8]", "--model.top_mlp", "[16,1]", "--train.warmup_steps", "9"]
SHAPE += ["--embedding.backend", "pgas", "--embedding.lr", "1.0"]
DCN = ["--model.arch", "dcn", "--model.cross_rank", "4", "--model.cross_layers", "2"]
BF16 = ["--train.precision", "bf16"]
KNOWN = ["--data.tables.multi_hot", "[4,3,1,1,2,1,1,1]"]
CACHED = ["--embedding.memory", "cached", "--embedding.cache_fraction", "0.001"]  # and the ids of two steps
HISTORY = ["--model.sequence.history", "1", "--model.sequence.candidate", "2", "--model.sequence.positions", "6"]
ADAM = ["--train.optimizer", "adam", "--train.lr", "0.01"]
Losses = list[torch.Tensor]


def _trainer(pipeline: str, *options: str) -> Trainer:
    config: Config = quickstart(Path("unused"), "run", *SHAPE, "--train.pipeline", pipeline, *options)
    trainer = make_trainer(config)
    assert isinstance(trainer.pipeline, GraphTrainPipeline) == (pipeline == "graph")
    return trainer


def _batch(trainer: Trainer, step: int) -> Batch:
    return trainer.train_data.read((step * trainer.world.world_size + trainer.world.rank) * SAMPLES, SAMPLES)


def _batches(trainer: Trainer, first: int = 0) -> Iterator[Batch]:
    while True:
        yield _batch(trainer, first)
        first += 1


def _train(trainer: Trainer, first: int, end: int, batches: Iterator[Batch] | None = None) -> Losses:
    """Take the steps [first, end) by the schedule of learning rates; the pipeline runs empty unless given `batches`."""
    segment = batches or islice(_batches(trainer, first), end - first)
    losses = []
    for step in range(first, end):
        trainer.learning_rate.set(step)
        losses.append(trainer.step(segment).clone())
    return losses


def _state(trainer: Trainer) -> dict[str, torch.Tensor]:
    states = {
        f"{name}, {key}": state
        for name, each in trainer.optimizer.state_dict()["state"].items()
        for key, state in each.items()
        if isinstance(state, torch.Tensor) or hasattr(state, "local_shards")
    }
    return dict(local_tensors(trainer.model.state_dict())) | dict(local_tensors(states))


def _assert_same(found: Losses, expected: Losses, what: str) -> None:
    """Check losses, bit for bit on up to two ranks; more may add dense gradients in another order."""
    tolerance = 0.0 if dist.get_world_size() <= 2 else LOSS_TOLERANCE["adagrad"]
    assert_near(torch.stack(found), torch.stack(expected), tolerance, what)


def _assert_same_state(found: Trainer, expected: Trainer) -> None:
    if dist.get_world_size() <= 2:
        ours, theirs = _state(found), _state(expected)
        assert_all_near(ours, {name: theirs[name] for name in ours}, 0.0, "after the last step")
        assert ours.keys() == theirs.keys()


def _checkpointer() -> tuple[Path, Checkpointer]:
    names: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    return Path(names[0]), Checkpointer(Path(names[0]), keep=1, shape={})


def _close(*trainers: Trainer) -> None:
    dist.barrier()
    for trainer in trainers:
        trainer.close()


def _run(trainer: Trainer, borders: Sequence[int]) -> tuple[Losses, Losses]:
    """Return the losses of segments of steps, and of the evaluations after each."""
    losses, evaluated = list[torch.Tensor](), list[torch.Tensor]()
    for first, end in pairwise(borders):
        trainer.pipeline.reset()
        losses += _train(trainer, first, end)
        evaluated.append(torch.tensor(trainer.evaluate()["loss"]))
    return losses, evaluated


def _check_segments(
    *options: str, borders: Sequence[int] = (0, 1, 5, 12), ours_alone: Sequence[str] = (), captured: bool = False
) -> None:
    """Both pipelines give the same bits, or ours with `ours_alone` and without: only ours exchanges histories."""
    theirs = _trainer("graph" if ours_alone else "torchrec", *options)
    expected, expected_evaluated = _run(theirs, borders)
    with captures() if captured else nullcontext() as taken:
        ours = _trainer("graph", *options, *ours_alone)
        losses, evaluated = _run(ours, borders)
        _assert_same(losses, expected, "loss")
        _assert_same(evaluated, expected_evaluated, "held-out loss")
        _assert_same_state(ours, theirs)
        _close(ours, theirs)
    if taken is not None:
        assert taken["captured"] >= 2
        assert taken["replayed"] >= 4


def _evaluate(trainer: Trainer, steps: Sequence[int], batches: Iterator[Batch] | None = None) -> Losses:
    trainer.model.eval()
    with torch.no_grad():
        segment = batches or iter([_batch(trainer, 1000 + step) for step in steps])
        losses = [trainer.pipeline.progress(segment)[0].clone() for _ in steps]
    trainer.model.train()
    return losses


def _check_evaluations_within_a_segment() -> None:
    """An evaluation between two steps of a segment keeps the batches that were read ahead."""
    between = {2: 1, 5: 2, 7: 3, 8: 1, 11: 5, 15: 4}  # step -> batches that are evaluated before it
    theirs, ours = _trainer("torchrec"), _trainer("graph")
    expected, losses, batches = list[torch.Tensor](), list[torch.Tensor](), _batches(ours)
    for first, end in pairwise((0, *between, 20)):
        theirs.pipeline.reset()
        expected += _train(theirs, first, end)
        if end in between:
            theirs.pipeline.reset()
            expected += _evaluate(theirs, range(between[end]))
    for first, end in pairwise((0, *between, 20)):
        losses += _train(ours, first, end, batches)
        if end in between:
            losses += _evaluate(ours, range(between[end]))
    _assert_same(losses, expected, "loss")
    _assert_same_state(ours, theirs)
    _close(ours, theirs)


def _check_forwards_between_steps() -> None:
    """A user's forward is refused while ids of a training batch are under way, since it would look those up."""
    ours, undisturbed = _trainer("graph"), _trainer("graph")
    batches = _batches(ours)
    losses = _train(ours, 0, 4, batches)
    for training in (True, False):
        ours.model.train(training)
        with torch.no_grad(), refuses("ids of another batch are under way"):
            ours.model(_batch(ours, 9))
    ours.model.train()
    losses += _train(ours, 4, 8, batches)
    _assert_same(losses, _train(undisturbed, 0, 8, _batches(undisturbed)), "loss")
    ours.pipeline.reset()
    with torch.no_grad():
        ours.model(_batch(ours, 9))
    _close(ours, undisturbed)


def _check_evaluations_of_unequal_sizes() -> None:
    """Ranks evaluate batches of unequal sizes, by the pipeline or by the model; then they go on as before."""
    theirs, ours = _trainer("torchrec"), _trainer("graph")
    unequal = ours.train_data.read(0, 3 + dist.get_rank())
    expected = _train(theirs, 0, 3) + _evaluate(theirs, range(1), iter([unequal]))
    theirs.pipeline.reset()
    expected += _train(theirs, 3, 6)
    batches = _batches(ours)
    losses = _train(ours, 0, 3, batches) + _evaluate(ours, range(1), iter([unequal])) + _train(ours, 3, 6, batches)
    _assert_same(losses, expected, "loss")
    _assert_same_state(ours, theirs)
    ours.pipeline.reset()
    ours.model.eval()
    with torch.no_grad():
        by_model = ours.model(unequal)[1][0].clone()
    _assert_same([by_model], _evaluate(ours, range(1), iter([unequal])), "by the model")
    _close(ours, theirs)


def _check_ends_and_resets() -> None:
    theirs, ours = _trainer("torchrec"), _trainer("graph")
    order = [*range(4), *range(40, 43), *range(60, 61), *range(70, 75)]
    expected: Losses = []
    for step, number in enumerate(order):
        theirs.learning_rate.set(step)
        theirs.pipeline.reset()
        expected.append(theirs.step(iter([_batch(theirs, number)])).clone())
    ours.pipeline.reset()
    losses = _train(ours, 0, 4, _batches(ours))  # two more are read, but not trained on
    ours.pipeline.reset()
    segment = islice(_batches(ours, 40), 3)
    losses += _train(ours, 4, 7, segment)
    for _ in range(2):
        with pytest.raises(StopIteration):
            ours.step(segment)
    losses += _train(ours, 7, 8, islice(_batches(ours, 60), 1))
    with pytest.raises(StopIteration):
        ours.step(iter([]))
    losses += _train(ours, 8, 13, islice(_batches(ours, 70), 5))
    _assert_same(losses, expected, "loss")
    _close(ours, theirs)


def _check_uneven_ends() -> None:
    """When one rank has no batch left, all stop; TorchRec's pipeline hangs."""
    trainer = _trainer("graph")
    for count in (1, 2, 5):
        segment = islice(_batches(trainer), count + dist.get_rank())
        _train(trainer, 0, count, segment)
        for _ in range(2):
            with pytest.raises(StopIteration):
                trainer.step(segment)
    with pytest.raises(StopIteration):
        trainer.step(islice(_batches(trainer), dist.get_rank()))
    _train(trainer, 0, 2)
    _close(trainer)


def _check_resume(writer: str, reader: str, *options: str) -> None:
    """The second half of a run, by another pipeline from a checkpoint, is as by the first."""
    folder, checkpointer = _checkpointer()
    first, second = _trainer(writer, *options), _trainer(reader, *options)
    _train(second, 0, 2)  # then overwritten
    second.pipeline.reset()
    _train(first, 0, 6)
    checkpointer.write(6, extents_to_store(first.model, first.optimizer))
    assert checkpointer.load(folder / "step_6", second.model, second.optimizer) == 6
    first.pipeline.reset()
    expected = _train(first, 6, 12)
    _assert_same(_train(second, 6, 12), expected, f"{writer}, then {reader}")
    _assert_same_state(second, first)
    _close(first, second)


def _check_cached(*options: str) -> None:
    """Tables with caches have the rows of tables without, also if read or written in host memory during training."""
    folder, checkpointer = _checkpointer()
    all_rows = [*CACHED[:-1], "1"]
    trainers = [_trainer("graph", *options, *memory) for memory in ([], CACHED, all_rows)]
    plain, cached, resumed = trainers
    streams = [_batches(trainer) for trainer in trainers]
    initial = [deepcopy(trainer.model.state_dict()) for trainer in trainers]
    held = [local_tensors_of(trainer) for trainer in trainers]
    for first, end in ((0, 4), (4, 8)):
        losses = [_train(trainer, first, end, stream) for trainer, stream in zip(trainers, streams, strict=True)]
        _assert_same(losses[1], losses[0], "loss")
        _assert_same(losses[2], losses[0], "loss, slots for all rows")
        served = exchanges(cached.model)  # one of pooled tables, and one of the history's
        caches = [[cache for cache, _ in exchange.tables._cached_features] for exchange in served]
        on_ranks = torch.tensor([len(each) for each in caches])
        dist.all_reduce(on_ranks)
        assert int(on_ranks.min()) > 0
        assert all(cache.slots < cache.host_rows[0].shape[0] for each in caches for cache in each), "none is evicted"
        stale = [name for name, rows in held[1].items() if not torch.equal(rows, held[0][name])]
        assert stale, "host memory has no newer rows than the cache yet"
        for exchange in served:
            exchange.tables.write_back()  # as a save during training does
        assert_all_near(held[1], held[0], 0.0, "written back")
        if first == 0:  # ids are sent ahead
            for trainer in trainers:
                for shard in local_tensors_of(trainer).values():
                    shard.mul_(0.5)
        else:
            for trainer, state in zip(trainers, initial, strict=True):
                trainer.model.load_state_dict(state)  # pyright: ignore[reportArgumentType]
    checkpointer.write(8, extents_to_store(cached.model, cached.optimizer))
    _train(resumed, 8, 10, streams[2])  # then overwritten
    resumed.pipeline.reset()
    assert checkpointer.load(folder / "step_8", resumed.model, resumed.optimizer) == 8
    expected = _train(plain, 8, 12, streams[0])
    _assert_same(_train(cached, 8, 12, streams[1]), expected, "loss after the save")
    _assert_same(_train(resumed, 8, 12), expected, "loss of the run that resumes")
    _assert_same_state(cached, plain)
    _assert_same_state(resumed, plain)
    _close(*trainers)


def local_tensors_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the rows of this rank's tables, not copies."""
    tables = [(name, each) for name, each in trainer.model.state_dict().items() if hasattr(each, "local_shards")]
    return {name: shard.tensor for name, each in tables for shard in each.local_shards()}


def _check_gradient_dtype() -> None:
    """Dense gradients are rounded if they are sent, that is if there are several ranks."""
    rounded, exact = (_trainer("graph", "--train.gradient_dtype", dtype) for dtype in ("bf16", "fp32"))
    found, expected = (torch.stack(_train(trainer, 0, 8)) for trainer in (rounded, exact))
    assert_near(found, expected, 1e-2, "loss")
    assert torch.equal(found, expected) == (dist.get_world_size() == 1)
    _close(rounded, exact)


def _check_in_place(pipelines: Sequence[str], *options: str) -> None:
    """Pooled embeddings that are sent in bfloat16 and joined in place train as if the model rounds them."""
    borders = (0, 3, 7)
    for pipeline in pipelines:
        ours, cast = (_trainer(pipeline, *BF16, *more, *options) for more in ([], ["--embedding.wire_dtype", "fp32"]))
        found, expected = (_run(trainer, borders) for trainer in (ours, cast))
        for losses, wanted, what in zip(found, expected, ("loss", "held-out loss"), strict=True):
            _assert_same(losses, wanted, f"{pipeline}, {what}")
        _assert_same_state(ours, cast)
        models = [each for trainer in (ours, cast) for each in trainer.model.modules() if isinstance(each, DLRM)]
        assert [model.joins_in_place for model in models] == [True, False]
        _close(ours, cast)


class OwnIds(Model):
    """Makes the KeyedJaggedTensor itself."""

    def forward(self, batch: Batch) -> Any:
        ids = batch.sparse
        made = KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths(), stride=ids.stride())
        return super().forward(replace(batch, sparse=made))


class Frozen(Model):
    """Has a layer that is not trained."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.frozen = torch.nn.Linear(1, 1)
        self.frozen.requires_grad_(False)

    def forward(self, batch: Batch) -> Any:
        return super().forward(replace(batch, dense=self.frozen(batch.dense)))


class Summing(Model):
    """Calls a collective."""

    def forward(self, batch: Batch) -> Any:
        dense = batch.dense.clone()
        dist.all_reduce(dense)
        return super().forward(replace(batch, dense=dense))


class Unused(Model):
    """Has a layer that no loss depends on."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unused = torch.nn.Linear(3, 2)


def _warm_up(optimizer: CombinedOptimizer) -> WarmupOptimizer:
    """Change the learning rates of tables and dense parameters in every step, from the first one on."""
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1), WarmupStage(WarmupPolicy.POLY, 9, value=2.0)]
    return WarmupOptimizer(optimizer, stages, lr=0.3)


def _check_models(kind: type[Model], reference: str, **kwargs: Any) -> None:
    """A model of two embedding modules, of which one is all on one rank."""
    last = dist.get_world_size() - 1
    tables, other = {"a": (20, 8, ["f"], SUM), "b": (9, 4, ["g"], SUM)}, {"c": (12, 8, ["h"], SUM)}
    batches = list(islice(_small_batches(), 9))
    found: dict[str, dict[str, Any]] = {}
    for pipeline in (reference, "graph"):
        model = kind(tables, other)
        params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.5}
        sharder = OverlapEmbeddingBagCollectionSharder(params, copy_output=True)
        plan = make_plan(model, {"a": [last], "b": [0]}, {"c": [last]}, sharder)
        found[pipeline] = train(model, plan, sharder, batches, pipeline, **kwargs)
    for step, (ours, theirs) in enumerate(zip(found["graph"]["outputs"], found[reference]["outputs"], strict=True)):
        assert_all_near(ours, theirs, 0.0, f"step {step}, output")
    for what in ("weights", "states"):
        assert_all_near(found["graph"][what], found[reference][what], 0.0, what)


def _small_pipeline(model: Model, sharding: Any = (0,)) -> GraphTrainPipeline:
    sharder: Any = OverlapEmbeddingBagCollectionSharder()
    plan = make_plan(model, {"a": sharding}, {"c": [0]}, sharder)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=[sharder], init_data_parallel=False)
    return GraphTrainPipeline(sharded, torch.optim.SGD(dense_parameters(sharded).values(), lr=0.1), CPU)


def _assert_equal_on_ranks(model: torch.nn.Module) -> None:
    for name, parameter in dense_parameters(model).items():
        every = [torch.empty_like(parameter) for _ in range(dist.get_world_size())]
        dist.all_gather(every, parameter.data)
        assert_same(every[0], every[-1], name)


def _check_a_loop_after_close() -> None:
    """The ranks' dense weights stay equal in a loop of the program's own, once no pipeline trains the model."""
    first = _small_pipeline(Model({"a": (20, 8, ["f"], SUM)}, {"c": (12, 8, ["h"], SUM)}))
    model, optimizer = first._model, first._optimizer
    model.init_data_parallel()
    second = GraphTrainPipeline(model, optimizer, CPU)
    batches, wrapped = _small_batches(), list[bool]()
    for pipeline in (first, second):
        pipeline.progress(islice(batches, 1))
    for pipeline in (first, second, second):
        pipeline.close()
        wrapped.append(isinstance(model._dmp_wrapped_module, DistributedDataParallel))
    assert wrapped == [False, True, True]
    for _ in range(2):
        optimizer.zero_grad()
        loss, _ = model(next(batches))
        loss.backward()
        optimizer.step()
    _assert_equal_on_ranks(model)
    for exchange in exchanges(model):
        exchange.close()


def _check_torchrec_after_row_wise_tables() -> None:
    """Empty bags of row-wise tables are not sent once the pipeline sends the ids, and TorchRec's step reads them."""
    by_rows = row_wise(compute_kernel="fused")
    pipeline = _small_pipeline(Model({"a": (20, 8, ["f"], SUM)}, {"c": (12, 8, ["h"], SUM)}), by_rows)
    pipeline.progress(islice(_small_batches(), 1))
    pipeline.close()
    torchrec = TrainPipelineSparseDist(pipeline._model, pipeline._optimizer, CPU)
    with refuses("row-wise tables are looked up for the ids that GraphTrainPipeline sends"):
        torchrec.progress(islice(_small_batches(), 1))


def _check_layers_start_equal() -> None:
    """Frozen or not, they are those of rank 0, though each rank of a program may have drawn its own."""
    model = Frozen({"a": (20, 8, ["f"], SUM)}, {"c": (12, 8, ["h"], SUM)})
    for parameter in model.parameters():
        if not parameter.is_meta:
            parameter.data.add_(dist.get_rank())
    model.frozen.weight.data.fill_(dist.get_rank() + 7.0)
    pipeline = _small_pipeline(model)
    pipeline.progress(islice(_small_batches(), 1))
    assert model.frozen.weight.item() == 7.0
    _assert_equal_on_ranks(pipeline._model)
    pipeline.close()


def _check_profiled() -> None:
    trainer = _trainer("torchrec")
    batches = _batches(trainer)
    report = str(profile_steps(lambda: trainer.pipeline.progress(batches), trainer.model, steps=3, after=1))
    if dist.get_rank() == 0:
        assert report.startswith("3 steps timed and 3 traced, 2 ranks, cpu"), report
        assert re.search(r"^dlrm.embedding  t_00 +\w+_wise ", report, re.MULTILINE), report
    _close(trainer)


def _check_pipelines_in_turns() -> None:
    _compare_turns(*(islice(_small_batches(), count) for count in (5, 4, 5)))


def _check_a_smaller_batch_after_a_turn() -> None:
    """A batch that no captured step can take exceeds the windows of the pipeline whose turn has ended."""
    _compare_turns([_full_batch(5, 4)] * 2, [_full_batch(5, 1)] * 2, [_full_batch(4, 4), _full_batch(5, 4)])


def _full_batch(samples: int, bag_size: int) -> Batch:
    lengths = torch.tensor([0] + [bag_size] * (3 * samples - 1)).int()
    ids = KeyedJaggedTensor(["g", "h", "f"], torch.arange(int(lengths.sum())) % 9, lengths=lengths)
    return Batch(torch.ones(samples, 1), ids, torch.empty(0))


def _compare_turns(*turns: Iterable[Batch]) -> None:
    """Check that two pipelines that take turns give what one gives."""
    parts, found = [list(turn) for turn in turns], []
    for count in (1, 2):
        torch.manual_seed(0)
        first = _small_pipeline(Model({"a": (20, 8, ["f"], SUM)}, {"c": (12, 8, ["h"], SUM)}))
        second = GraphTrainPipeline(first._model, first._optimizer, CPU) if count == 2 else first
        outputs = []
        for pipeline, part in zip((first, second, first), parts, strict=True):
            segment = iter(part)
            outputs += [{name: each.clone() for name, each in pipeline.progress(segment).items()} for _ in part]
        found.append(outputs)
        second.close()
        first.close()
    for step, (one, two) in enumerate(zip(*found, strict=True)):
        assert_all_near(two, one, 0.0, f"step {step}")


def _small_batches() -> Iterator[Batch]:
    """Yield batches; the first, from which the capacity is learnt, has the most ids."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.tensor([2, 2, 2, 2, 0] * 3).int()
    while True:
        values = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
        ids = KeyedJaggedTensor(["g", "h", "f"], values, lengths=lengths)
        yield Batch(torch.rand(5, 1, generator=generator), ids, torch.empty(0))
        lengths = torch.randint(0, 3, (3 * 5,), generator=generator).int()


# Segments that end while one graph is captured, and none, and both; after an odd and an even number of steps.
BORDERS = ((0, 5, 9, 16, 17, 21), (0, 5, 6, 9, 15), (0, 4, 12, 19), (0, 3, 7, 9, 11, 16))


def _check_captured(replayed: int, check: Callable[..., None], *arguments: Any, **options: Any) -> None:
    """Run a check that captures two steps if any, and replays this number."""
    with captures() as taken:
        check(*arguments, **options)
    assert taken == {"captured": 2 if replayed else 0, "replayed": replayed}, f"steps {taken}"


def _check_moved_after_the_capture() -> None:
    """Graphs are no longer launched once memory that they use has been moved or freed, or tables are frozen."""

    def move_rows(exchange: Exchange) -> None:
        lookups: list[Any] = exchange.tables.lookups
        for lookup in lookups:
            lookup.weights_host = torch.nn.Parameter(lookup.weights_host.detach().clone())

    def freeze(exchange: Exchange) -> None:
        lookups: list[Any] = exchange.tables.lookups
        for lookup in lookups:
            lookup.requires_grad_(False)

    for move, rule in (
        (Exchange.close, "were moved or freed since"),
        (move_rows, "were moved or freed since"),
        (freeze, "tables were frozen, or are trained again, since"),
    ):
        with captures() as taken:
            trainer = _trainer("graph")
            _train(trainer, 0, 8, batches := _batches(trainer))
            replayed = taken["replayed"]
            assert replayed >= 2
            dist.barrier()
            for exchange in exchanges(trainer.model):
                move(exchange)
            with refuses(rule):
                trainer.step(batches)
            assert taken["replayed"] == replayed
            if move is freeze and isinstance(trainer.pipeline, GraphTrainPipeline):
                trainer.pipeline.close()
                trainer.step(batches)
            _close(trainer)


CASES: dict[str, Callable[[], None]] = {
    "dot, fp32": _check_segments,
    "dcn, fp32": partial(_check_segments, *DCN, *KNOWN),
    "dcn, bf16": partial(_check_segments, *DCN, *BF16, *ADAM),
    "dot, in place": partial(_check_in_place, ["graph"]),
    "dcn, in place": partial(_check_in_place, ["graph", "torchrec"], *DCN, "--embedding.backend", "fused"),
    "evaluations within a segment": _check_evaluations_within_a_segment,
    "evaluations of unequal sizes": _check_evaluations_of_unequal_sizes,
    "ends and resets": _check_ends_and_resets,
    "uneven ends": _check_uneven_ends,
    "forwards between steps": _check_forwards_between_steps,
    "gradients sent as bf16": _check_gradient_dtype,
    "graph, then torchrec, bf16": partial(_check_resume, "graph", "torchrec", *BF16, *ADAM),
    "another optimizer": partial(_check_models, Model, "sparse_dist"),
    "a warm-up of all, a frozen layer": partial(_check_models, Frozen, "none", wrap=_warm_up),
    "layers start equal": _check_layers_start_equal,
    "a loop after close": _check_a_loop_after_close,
    "torchrec after row-wise tables": _check_torchrec_after_row_wise_tables,
    "profiled": _check_profiled,
    "pipelines in turns": _check_pipelines_in_turns,
    "a smaller batch after a turn": _check_a_smaller_batch_after_a_turn,
    "an unused layer": partial(_check_models, Unused, "none", dense_optimizer=torch.optim.AdamW),
    "a model's own ids": partial(_check_models, OwnIds, "none"),
    "cached tables": partial(_check_cached, *HISTORY, "--embedding.optimizer", "adagrad"),
    "cached tables, segments": partial(_check_segments, *HISTORY, ours_alone=CACHED),
    "torchrec, then graph": partial(_check_resume, "torchrec", "graph", *ADAM),
}
if INTERPRETED:
    CASES |= {
        "captured": partial(_check_segments, borders=BORDERS[0], captured=True),
        "captured, bf16": partial(_check_segments, *BF16, borders=BORDERS[1], captured=True),
        "captured, known lengths, bf16": partial(_check_segments, *KNOWN, *BF16, borders=BORDERS[2], captured=True),
        "captured, cached tables": partial(
            _check_segments, *HISTORY, borders=BORDERS[3], ours_alone=CACHED, captured=True
        ),
        "captured, an unused layer": partial(
            _check_captured, 4, _check_models, Unused, "none", dense_optimizer=torch.optim.AdamW
        ),
        "captured, a warm-up of all": partial(_check_captured, 4, _check_models, Model, "sparse_dist", wrap=_warm_up),
        "captured, evaluations within a segment": partial(_check_captured, 15, _check_evaluations_within_a_segment),
        "captured, another optimizer": partial(_check_captured, 4, _check_models, Model, "sparse_dist"),
        "captured, collectives of the model's own": partial(_check_captured, 0, _check_models, Summing, "none"),
        "captured, a model's own ids": partial(_check_captured, 4, _check_models, OwnIds, "none"),
        "moved after the capture": _check_moved_after_the_capture,
    }


def _run_case(case: str) -> None:
    CASES[case]()


# What every `make test` runs; the rest differs little from it.
QUICK_ALONE = ["ends and resets", "another optimizer"]
SLOW_ALONE = ["dot, fp32", "dcn, bf16", "evaluations within a segment"]
SLOW_OF_TWO = ["dcn, fp32", "cached tables, segments", "dcn, in place", "torchrec, then graph"]
OF_FOUR = ["dot, fp32"]
if INTERPRETED:
    SLOW_ALONE += ["captured", "captured, bf16"]
    quick = ("captured", "captured, another optimizer")
    SLOW_OF_TWO += [case for case in CASES if case.startswith("captured") and case not in quick]
    OF_FOUR += ["captured"]
QUICK_OF_TWO = [case for case in CASES if case not in SLOW_OF_TWO]


@pytest.mark.parametrize("case", [*QUICK_ALONE, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_ALONE)])
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("world_of_one")
def test_a_rank_alone(case: str) -> None:
    _run_case(case)


two_ranks = cases_on_ranks(2, _run_case, QUICK_OF_TWO)
two_ranks_more = cases_on_ranks(2, _run_case, SLOW_OF_TWO)
four_ranks = cases_on_ranks(4, _run_case, OF_FOUR)


@pytest.mark.parametrize("case", QUICK_OF_TWO)
def test_two_ranks(two_ranks: Callable[[str], None], case: str) -> None:
    two_ranks(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_OF_TWO)
def test_two_ranks_more(two_ranks_more: Callable[[str], None], case: str) -> None:
    two_ranks_more(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_FOUR)
def test_four_ranks(four_ranks: Callable[[str], None], case: str) -> None:
    four_ranks(case)
