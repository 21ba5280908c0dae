"""Training through the sharder: the losses of TorchRec's modules, for any plan, and across checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import row_wise
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.checkpoint.checkpoint import Checkpointer, extents_to_store
from dlrm_overlap.config import Config, DataConfig, EmbeddingConfig, LogConfig, ModelConfig, TablesConfig, TrainConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.train.trainer import Trainer
from tests.agreement import LOSS_TOLERANCE, assert_all_near, assert_same
from tests.distributed.models import MEAN, SUM, Model, Tables, make_plan, train
from tests.distributed.window_inputs import CASES, compare
from tests.gpu.exchange.place import Check, Place, every

_BACKENDS = ("nccl", "pgas", "fused")
# Adagrad's is so small that losses fall steadily: at 0.1 they jump, and with its ranks' samples swapped even TorchRec's
# differ by 1.6e-5 in 20 steps on 4 ranks; at 0.03 by 2e-7.
_LEARNING_RATE = {"sgd": 20.0, "adagrad": 0.03, "rowwise_adagrad": 0.1}
COUNTING = "adam", "partial_rowwise_adam", "lamb", "partial_rowwise_lamb"  # count steps; FBGEMM has them only on GPUs
_ROWS_TOLERANCE = 1e-3  # norm of a shard's error relative to its change in a run, which amplifies rounding
_STEPS = 20
SAMPLES = 256  # a rank

_Rows = dict[tuple[str, int], torch.Tensor]  # (table, first column) -> shard


def small_config(place: Place, backend: Any, optimizer: Any, plan: Any = "auto", **train: Any) -> Config:
    """Return a small DLRM on synthetic data, with gelu, which is smooth and so does not amplify rounding."""
    rows, multi_hot = [2000, 2000, 1000, 1000, 500, 500, 100, 20], [4, "0..6", 1, 1, 2, 1, 1, 1]
    lr, train = _LEARNING_RATE.get(optimizer, 0.01), {"pipeline": "torchrec"} | train
    return Config(
        model=ModelConfig(dim=16, bottom_mlp=[64, 16], top_mlp=[64, 32, 1], activation="gelu"),
        # Ranks may have no children.
        data=DataConfig(tables=TablesConfig(rows=rows, multi_hot=multi_hot), eval_samples=4096, workers=0),
        embedding=EmbeddingConfig(backend=backend, optimizer=optimizer, plan=plan, lr=lr, wait_timeout_s=20.0),
        train=TrainConfig(batch_size=SAMPLES, steps=_STEPS, **train),
        log=LogConfig(dir=str(place.folder)),
    )


def make_trainer(place: Place, config: Config) -> Trainer:
    return Trainer(config, place.world, place.device, *open_datasets(config.data))


def train_steps(place: Place, trainer: Trainer, first: int, end: int) -> list[float]:
    """Take the steps [first, end) and return the mean losses of all ranks."""
    samples = place.world_size * SAMPLES
    batches = [trainer.train_data.read(step * samples + place.rank * SAMPLES, SAMPLES) for step in range(first, end)]
    trainer.pipeline.reset()
    segment, losses = iter(batches), []
    for step in range(first, end):
        trainer.learning_rate.set(step)
        losses.append(trainer.step(segment).detach().clone())  # a graph's outputs are its own
    total = torch.stack(losses)
    dist.all_reduce(total, group=place.group)
    return (total / place.world_size).tolist()


def rows_of(trainer: Trainer) -> _Rows:
    trainer.gather_dense()  # state dicts are refused while dense weights are up to date on their owners only
    tables = {name: table for name, table in trainer.model.state_dict().items() if isinstance(table, ShardedTensor)}
    shards = [(name, shard) for name, table in tables.items() for shard in table.local_shards()]
    return {(name, shard.metadata.shard_offsets[1]): shard.tensor.clone() for name, shard in shards}


def _run(
    place: Place, backend: str, optimizer: str, plan: str = "auto", graph_dense: bool = False
) -> tuple[list[float], _Rows, _Rows]:
    """Return a run's losses, and its rows before and after; check that `backend` was used."""
    trainer = make_trainer(place, small_config(place, backend, optimizer, plan, graph_dense=graph_dense))
    used = [exchange.options.backend for exchange in exchanges(trainer.model)]
    assert used == ([] if backend == "torchrec" else [backend]), f"exchanged by {used}"
    backward = BACKENDS[backend].backward
    assert all(exchange.options.resolved_backward == backward for exchange in exchanges(trainer.model))
    before = rows_of(trainer)
    losses = train_steps(place, trainer, 0, _STEPS)
    after = rows_of(trainer)
    place.close(trainer)
    return losses, before, after


def assert_agree(losses: Sequence[float], expected: Sequence[float], tolerance: float, name: str) -> None:
    assert len(losses) == len(expected)
    errors = [abs(loss - other) / other for loss, other in zip(losses, expected, strict=True)]
    assert max(errors) <= tolerance, (
        f"{name}, step {errors.index(max(errors))}: relative error {max(errors):.1e}; losses {losses}, not {expected}"
    )


def assert_rows_agree(
    rows: _Rows, expected: _Rows, before: _Rows, what: str, tolerance: float = _ROWS_TOLERANCE
) -> None:
    """Compare the rows of two runs that round differently: the norm of the difference relative to that of the change.

    Single elements tell little: with the samples of each batch in another order, the rows of a run on a CPU differ by
    up to 1e-5 of an element with row-wise Adagrad and 5e-3 with Adagrad, and by 2e-6 and 3e-5 in this norm.
    """
    assert rows.keys() == expected.keys()
    for (name, column), shard in expected.items():
        change = (shard - before[name, column]).norm()
        error = (rows[name, column] - shard).norm() / change
        assert change > 0
        assert error <= tolerance, f"{what}, {name} from column {column}: relative error {error:.1e}"


def _check_losses(place: Place, optimizer: str, plan: str) -> None:
    expected, before, expected_rows = _run(place, "torchrec", optimizer, plan)
    assert min(expected) < 0.95 * expected[0], "a run that learns nothing agrees with anything"
    for backend in _BACKENDS:
        losses, _, rows = _run(place, backend, optimizer, plan)
        assert_agree(losses, expected, LOSS_TOLERANCE.get(optimizer, LOSS_TOLERANCE["adagrad"]), backend)
        assert_rows_agree(rows, expected_rows, before, backend)


def _check_graphed(place: Place) -> None:
    """Runs with the dense part in CUDA graphs end in the same bits, whatever streams autograd and DDP run on."""
    expected, _, expected_rows = _run(place, "pgas", "rowwise_adagrad", graph_dense=True)
    for run in (1, 2):
        losses, _, rows = _run(place, "pgas", "rowwise_adagrad", graph_dense=True)
        assert losses == expected, f"run {run}: losses {losses}, not {expected}"
        assert_all_near(rows, expected_rows, 0.0, f"run {run}:")


def check_resumes(place: Place, writer: Config, reader: Config, steps: int) -> None:
    """Check that a run that resumes another's checkpoint with its own configuration has the other's losses."""
    first, half = make_trainer(place, writer), steps // 2
    train_steps(place, first, 0, half)
    checkpointer = Checkpointer(place.folder / f"{place.name}_checkpoints", keep=1, shape={})
    checkpointer.write(half, extents_to_store(first.model, first.optimizer))
    expected = train_steps(place, first, half, steps)
    place.close(first)
    second = make_trainer(place, reader)
    assert checkpointer.load(checkpointer.folder / f"step_{half}", second.model, second.optimizer) == half
    losses = train_steps(place, second, half, steps)
    place.close(second)
    assert_agree(losses, expected, LOSS_TOLERANCE[writer.embedding.optimizer], "after the checkpoint")


def _check_checkpoint(place: Place, writer: str, reader: str) -> None:
    first, second = (small_config(place, backend, "rowwise_adagrad") for backend in (writer, reader))
    check_resumes(place, first, second, _STEPS)


@dataclass(frozen=True)
class _Case:
    """Options of the exchange of two collections."""

    backend: str
    row_wise: bool = False
    weighted: bool = False
    output: SparseType = SparseType.FP32


def _shards(place: Place, case: _Case, tables: Tables) -> dict[str, Any]:
    """Return a plan: tables round robin on the ranks, one cut by columns and, if asked for, one by rows."""
    found: dict[str, Any] = {}
    for t, (name, (_, dim, *_)) in enumerate(tables.items()):
        columns = [(t + cut) % place.world_size for cut in range(2)]
        if t == 2 and case.row_wise:
            found[name] = row_wise(compute_kernel="fused")
        # TorchRec's lookups on a rank without tables are float32, whatever the other ranks' are.
        elif (t == 1 and dim >= 32) or case.output != SparseType.FP32:
            found[name] = columns
        else:
            found[name] = columns[:1]
    return found


def _batches(place: Place, case: _Case) -> list[Batch]:
    generator, found = torch.Generator().manual_seed(place.rank), []
    samples = SAMPLES + (0 if case.row_wise else place.rank)
    for _ in range(4):
        lengths = torch.randint(0, 4, (9 * samples,), generator=generator)
        ids = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
        # Products with powers of two are exact: FBGEMM on a CPU may fuse a product with a sum.
        powers = torch.tensor([-2.0, -0.5, 0.0, 0.25, 1.0])
        weights = powers[torch.randint(5, ids.shape, generator=generator)] if case.weighted else None
        sparse = KeyedJaggedTensor([f"f{t}" for t in range(9)], ids, weights=weights, lengths=lengths)
        found.append(Batch(torch.rand(samples, 1, generator=generator), sparse, torch.zeros(samples)))
    return found


def _outputs(place: Place, case: _Case, sharder: Any, expected_exchanges: int) -> list[dict[str, torch.Tensor]]:
    """Train two collections and return the pooled embeddings of each step."""
    tables: Tables = {f"t{t}": (40 + t, (64, 16)[t % 2], [f"f{t}"], SUM) for t in range(5)}
    others: Tables = {f"t{t}": (40 + t, 32, [f"f{t}"], SUM if case.weighted else MEAN) for t in range(5, 9)}
    model, local_size = Model(tables, others, case.weighted), place.world.local_world_size
    shards = _shards(place, case, tables), _shards(place, case, others)
    plan = make_plan(model, *shards, sharder, local_size, device_type=place.device.type)

    def meet(*_: Any) -> None:  # before windows are freed
        place.meet()

    found = train(model, plan, sharder, _batches(place, case), "sparse_dist", after=meet, device=place.device)
    assert len(found["exchanged"]) == expected_exchanges
    return found["outputs"]


def _check_collections(place: Place, case: _Case) -> None:
    """Pooled embeddings are TorchRec's: to the last bit in the first step, then except for the rounding of updates."""
    fused_params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5, "output_dtype": case.output}
    theirs = _outputs(place, replace(case, backend="torchrec"), EmbeddingBagCollectionSharder(dict(fused_params)), 0)
    sharder = OverlapEmbeddingBagCollectionSharder(dict(fused_params), backend=case.backend, wait_timeout_s=20.0)
    ours = _outputs(place, case, sharder, 2)
    for step, (outputs, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert list(outputs) == list(expected)
        for name in expected:
            where = f"step {step}, feature {name}"
            if step == 0 and not case.row_wise:  # whose partial sums TorchRec adds in the collective's order
                assert_same(outputs[name], expected[name], where)
            error = (outputs[name] - expected[name]).abs().max() / expected[name].abs().max()
            rounding = 0.0 if case.output == SparseType.FP32 else torch.finfo(case.output.as_dtype()).eps
            assert error <= LOSS_TOLERANCE["sgd"] + rounding, f"{where}: relative error {error:.1e}"
    assert not torch.equal(theirs[0]["f0"][:SAMPLES], theirs[1]["f0"][:SAMPLES]), "the batches are all the same"


def _collections(
    name: str, backends: Sequence[str] = _BACKENDS, gpu_only: bool = False, **case: Any
) -> dict[str, Check]:
    cases = {backend: _Case(backend, **case) for backend in backends}
    return every(name, _check_collections, case=cases, gpu_only=gpu_only)


def _check_window_input_dist(place: Place, case: str) -> None:
    """Many steps, slow on one rank after the other, have the same bits as with TorchRec's input_dist."""
    compare(case, place.device, repeats=6 if place.on_gpu else 1)


CHECKS = (
    every("losses", partial(_check_losses, plan="auto"), optimizer=list(_LEARNING_RATE))
    | every("losses", partial(_check_losses, plan="auto"), optimizer=COUNTING, gpu_only=True)
    | every("losses_columns", partial(_check_losses, optimizer="sgd", plan="column_wise"))
    | every("losses_rows", partial(_check_losses, optimizer="sgd", plan="row_wise"), gpu_only=True)
    | every("losses_graphed", _check_graphed, gpu_only=True)
    | every("checkpoint_torchrec", partial(_check_checkpoint, writer="torchrec"), reader=("pgas", "fused"))
    | every("checkpoint", _check_checkpoint, writer=["pgas"], reader=["torchrec"])
    | _collections("collections")
    | _collections("collections_rows", gpu_only=True, row_wise=True)
    | _collections("collections_bf16", _BACKENDS[1:], gpu_only=True, output=SparseType.BF16)
    | _collections("collections_fp16", _BACKENDS[1:], output=SparseType.FP16)
    | _collections("collections_weighted", weighted=True)
    | every("window_input_dist", _check_window_input_dist, case={name.replace(" ", "_"): name for name in CASES})
)
