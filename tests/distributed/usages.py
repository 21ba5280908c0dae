"""Ways in which models use an embedding collection, each trained under any sharder. Imports no pytest.

The drop-in must support what TorchRec supports: outputs that are changed in place or kept, several calls of a
collection per step, forwards without a backward, late backwards, and optimizers that change during training.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    WeightDecayMode,
)
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.data import batch as data
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from dlrm_overlap.embedding.weights import initialise_tables
from tests.agreement import LOSS_TOLERANCE, WEIGHT_TOLERANCE, assert_near
from tests.distributed.models import local_tensors, optimizer_states

STEPS = 4
SAMPLES = 12
ROWS, DIM, FEATURES = 30, 16, 4
LEARNING_RATES = {"sgd": 0.5, "rowwise_adagrad": 0.05}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "rowwise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    **{
        f"counter_{mode.name.lower()}": {
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "weight_decay": 0.1,
            "weight_decay_mode": WeightDecayMode.COUNTER,
            "counter_based_regularization": CounterBasedRegularizationDefinition(
                mode, counter_halflife=halflife, adjustment_iter=1, adjustment_ub=0.02
            ),
        }
        for mode, halflife in (
            (CounterWeightDecayMode.L2, 3),
            (CounterWeightDecayMode.DECOUPLE, 0),
            (CounterWeightDecayMode.ADAGRADW, -2),
        )
    },
    "adam": {"optimizer": EmbOptimType.ADAM, "weight_decay": 0.1},
    "partial_rowwise_adam": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM, "weight_decay": 0.1},
    "lamb": {"optimizer": EmbOptimType.LAMB, "weight_decay": 0.1},
    "partial_rowwise_lamb": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB, "weight_decay": 0.1},
}
COUNTING = [name for name in _OPTIMIZERS if name not in LEARNING_RATES]
"""optimizers that count their steps"""
ON_GPUS_ALONE = [name for name in COUNTING if "counter" not in name]
"""optimizers without a CPU lookup in FBGEMM"""


class Tower(nn.Module):
    """An embedding collection and a loss of its output, [b, FEATURES * DIM]."""

    pooling = PoolingType.MEAN  # of one table; the others are pooled to sums

    def __init__(self) -> None:
        super().__init__()
        poolings = [PoolingType.SUM] * FEATURES
        poolings[2] = self.pooling
        tables = [
            EmbeddingBagConfig(ROWS, DIM, name=f"table{i}", feature_names=[f"feature{i}"], pooling=pooling)
            for i, pooling in enumerate(poolings)
        ]
        self.embedding = EmbeddingBagCollection(tables, device=torch.device("meta"))
        self.dense = nn.Linear(3, FEATURES * DIM)
        self.over = nn.Linear(FEATURES * DIM, 1)

    def pooled(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Return the pooled embeddings by position, so that the order of columns affects the loss."""
        return self.embedding(ids).values()

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.loss(self.pooled(ids) * self.dense(dense))

    def loss(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.over(hidden) - 1).square().mean() + hidden.square().mean()


class Sums(Tower):
    """Pools sums only: FBGEMM on a CPU does not divide the gradient of weighted means."""

    pooling = PoolingType.SUM


class ByName(Tower):
    """Uses the pooled embeddings by name, so that the loss is the same for any plan."""

    def pooled(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        by_name = self.embedding(ids).to_dict()
        return torch.cat([by_name[f"feature{i}"] for i in range(FEATURES)], dim=1)


class InPlace(Tower):
    """Changes the output in place."""

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.pooled(ids)
        pooled.mul_(3.0).add_(0.01).relu_()
        return self.loss(pooled * self.dense(dense))


class Twins(Tower):
    """Calls one collection twice, one tower after the other."""

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> torch.Tensor:
        left = self.pooled(ids) * self.dense(dense)
        right = self.pooled(others) * self.dense(dense + 1)
        return self.loss(left) + self.loss(right * left)


class TwoLookups(Tower):
    """Starts two lookups of one collection before it uses either, the later one first."""

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor, others: KeyedJaggedTensor) -> torch.Tensor:
        first, second = self.embedding(ids), self.embedding(others)
        hidden = self.dense(dense)
        return self.loss(second.values() * hidden) + self.loss(first.values() * hidden * 2)


class Recomputation(Tower):
    """Recomputes the lookup and the next layer in the backward."""

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        hidden: Any = checkpoint(lambda x: (self.pooled(ids) * x).tanh(), self.dense(dense), use_reentrant=False)
        return self.loss(hidden)


class SharedGradient(Tower):
    """Adds the output to a tensor that is also used elsewhere, so that autograd accumulates into one gradient."""

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        hidden, output = self.dense(dense), self.embedding(ids)
        # Computed between lookup and wait, so its gradient is added while the exchange sends the other one.
        between = (hidden * 5).square().mean() + self.loss(hidden * 3)
        return self.loss(hidden + output.values()) + between


class SumOverSamples(Tower):
    """Sums the output over the samples, so that all rows of its gradient are one row in memory."""

    def forward(self, dense: torch.Tensor, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.loss(self.pooled(ids).sum(0, keepdim=True) * self.dense(dense))


Batch = tuple[torch.Tensor, KeyedJaggedTensor, KeyedJaggedTensor]
Call = Callable[..., torch.Tensor]
Take = Callable[[Call, Tower, Optimizer, Batch, int], torch.Tensor]
"""takes a step with that number on a batch, and returns a scalar to compare"""


def _update(dense: Optimizer, *losses: torch.Tensor) -> torch.Tensor:
    """Take a step by the gradients of some losses, in order, and return their sum."""
    dense.zero_grad()
    for loss in losses:
        loss.backward()
    dense.step()
    return torch.stack(losses).detach().sum()


def _take(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    loss = call(*batch) if isinstance(tower, Twins | TwoLookups) else call(*batch[:2])
    return _update(dense, loss)


def _take_accumulated(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    """Two forwards, then their backwards in the same order."""
    return _update(dense, call(batch[0], batch[1]), call(batch[0] * 2, batch[2]))


def _take_with_evaluation(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    """Evaluate between forward and backward, and keep the outputs."""
    loss = call(*batch[:2])
    with torch.no_grad():
        kept = [tower.pooled(ids) for ids in (batch[2], batch[1], batch[2])]
    taken = _update(dense, loss)
    assert torch.equal(kept[0], kept[2]), "what was kept has changed"
    return taken + sum(pooled.sum() for pooled in kept)


def _take_after_evaluation(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    """Evaluate before each step, in inference mode on GPUs; FBGEMM has no such lookup on a CPU."""
    with torch.inference_mode() if batch[0].is_cuda else torch.no_grad():
        evaluated = call(*batch[:2]).clone()
    return _take(call, tower, dense, (batch[0], batch[2], batch[1]), step) + evaluated


def _take_or_skip(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    """Skip the backward of every other forward, and keep its graph during the next one."""
    skipped = call(*batch[:2]) if step % 2 else None
    taken = _take(call, tower, dense, (batch[0], batch[2], batch[1]), step)
    return taken if skipped is None else taken + skipped.detach()


def _take_compiled(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    # On a CPU without Inductor, whose backward fails there with TorchRec's sharder, too.
    compiler = "inductor" if batch[0].is_cuda else "eager"
    return _take(torch.compile(call, backend=compiler), tower, dense, batch, step)  # cached after the first call


def _lookups(tower: Tower) -> list[Any]:
    """Return the fused lookups that hold this rank's rows."""
    sharded: Any = tower.embedding
    return [module.emb_module for lookup in sharded._lookups for module in lookup._emb_modules]


def _take_with_changing_learning_rate(
    call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int
) -> torch.Tensor:
    """Change the learning rate between forward and backward, as a scheduler in a hook may."""
    loss = call(*batch[:2])
    for lookup in _lookups(tower):
        lookup.set_learning_rate(0.01 / (step + 1))
    dense.zero_grad()
    loss.backward()
    return loss.detach()


def _take_with_later_weight_decay(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    for lookup in _lookups(tower):
        lookup.update_hyper_parameters({"weight_decay": 0.2 * step, "eps": 1e-3 * (step + 1)})
    return _take(call, tower, dense, batch, step)


def _take_with_frozen_tables(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    """Freeze the tables with means in step 1, all tables in step 2, then none."""
    for lookup in _lookups(tower):
        frozen = step == 2 or (step == 1 and lookup.pooling_mode == PoolingMode.MEAN)
        for weights in lookup.parameters():
            weights.requires_grad_(not frozen)
    return _take(call, tower, dense, batch, step)


def _take_under_a_default_device(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    """Create tensors on the batch's device by default; on a CPU on the meta device, to reveal them."""
    with batch[0].device if batch[0].is_cuda else torch.device("meta"):
        return _take(call, tower, dense, batch, step)


def _take_weighted(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    """Add weights to the ids of every other step; FBGEMM applies them to unweighted collections, too."""
    ids = batch[1]
    if step % 2:
        weights = torch.linspace(0.5, 2.0, ids.values().numel(), device=ids.values().device)
        ids = KeyedJaggedTensor(ids.keys(), ids.values(), weights=weights, lengths=ids.lengths())
    return _take(call, tower, dense, (batch[0], ids, batch[2]), step)


def _take_gradients(call: Call, tower: Tower, dense: Optimizer, batch: Batch, step: int) -> torch.Tensor:
    """Ask autograd for some gradients, which updates no row, then for all."""
    pooled = tower.pooled(batch[1])
    loss = tower.loss(pooled * tower.dense(batch[0]))
    some = torch.autograd.grad(loss, [pooled, tower.over.weight], retain_graph=True)
    return _update(dense, loss) + sum(gradient.abs().sum() for gradient in some)


USAGES: dict[str, tuple[type[Tower], Take]] = {
    "in_place": (InPlace, _take),
    "twins": (Twins, _take),
    "two_lookups": (TwoLookups, _take),
    "accumulation": (Tower, _take_accumulated),
    "recomputation": (Recomputation, _take),
    "shared_gradient": (SharedGradient, _take),
    "evaluation_between": (Tower, _take_with_evaluation),
    "evaluation_first": (Tower, _take_after_evaluation),
    "sum_over_samples": (SumOverSamples, _take),
    "skipped_backward": (Tower, _take_or_skip),
    "compiled": (Tower, _take_compiled),
    "autograd_grad": (Tower, _take_gradients),
    "learning_rate_between": (Tower, _take_with_changing_learning_rate),
    "weight_decay_later": (Tower, _take_with_later_weight_decay),
    "frozen_tables": (ByName, _take_with_frozen_tables),
    "default_device": (Tower, _take_under_a_default_device),
    "weights_unasked": (Sums, _take_weighted),
}


def _plan(
    tower: Tower, sharder: ModuleSharder, group: dist.ProcessGroup, device: torch.device, cut: bool
) -> ShardingPlan:
    """Place whole tables on ranks in turn, and cut the columns of the last table, or of all with `cut`."""
    world_size, first_cut = group.size(), 0 if cut else FEATURES - 1
    ways = {f"table{i}": table_wise((i + 1) % world_size, compute_kernel="fused") for i in range(first_cut)}
    columns = column_wise([i % world_size for i in range(4)], compute_kernel="fused")
    ways |= {f"table{i}": columns for i in range(first_cut, FEATURES)}
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # fewer where ranks share a GPU
    plan = construct_module_sharding_plan(tower.embedding, ways, sharder, local_size, world_size, device.type)
    return ShardingPlan({"embedding": plan})


def _batches(rank: int, device: torch.device) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(rank)

    def ids() -> KeyedJaggedTensor:
        lengths = torch.randint(0, 4, (FEATURES * SAMPLES,), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor([f"feature{i}" for i in range(FEATURES)], values, lengths=lengths).to(device)

    for _ in range(STEPS):
        yield torch.rand(SAMPLES, 3, generator=generator).to(device), ids(), ids()


def _shard(
    kind: type[Tower], sharder: ModuleSharder, group: dist.ProcessGroup, device: torch.device, cut: bool = False
) -> tuple[Tower, DistributedModelParallel]:
    torch.manual_seed(0)
    tower = kind()
    model = DistributedModelParallel(
        tower,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=_plan(tower, sharder, group, device, cut),
        sharders=[sharder],
        init_data_parallel=False,
    )
    tower.to(device)
    initialise_tables(model, seed=0)
    return tower, model


def train(
    kind: type[Tower],
    take: Take,
    sharder: ModuleSharder,
    group: dist.ProcessGroup,
    device: torch.device,
    cut: bool = False,
) -> Mapping[str, torch.Tensor]:
    """Return this rank's losses, by step, and its rows and their state."""
    torch.compiler.reset()
    tower, model = _shard(kind, sharder, group, device, cut)
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    dense = torch.optim.SGD(parameters.values(), lr=0.1)
    given = {
        f"loss of step {step}": take(model, tower, dense, batch, step)
        for step, batch in enumerate(_batches(group.rank(), device))
    }
    rows = dict(local_tensors(model.state_dict()))
    states = optimizer_states(model)
    for exchange in exchanges(model):
        exchange.close()
    return given | rows | states


def compare(
    usage: str, optimizer: str, options: Sequence[Mapping[str, Any]], group: dist.ProcessGroup, device: torch.device
) -> None:
    """Check that the drop-in, with each of `options`, gives what TorchRec gives."""
    params = {**_OPTIMIZERS[optimizer], "learning_rate": LEARNING_RATES.get(optimizer, 0.05), "eps": 1e-3}
    if usage == "weight_decay_later":
        params["weight_decay_mode"] = WeightDecayMode.L2
    kind, take = USAGES[usage]
    # TorchRec's own losses differ from step 1 on if a model is compiled on GPUs (torch 2.11), so it is not.
    expected = _take if take is _take_compiled else take
    # If all tables of one kind of sharding are frozen on some ranks only, TorchRec's backward hangs, since these ranks
    # leave out its all-to-all. Cut by columns, some tables of each pooling are on every rank.
    cut = usage == "frozen_tables" and group.size() > 2
    torchrec = train(kind, expected, EmbeddingBagCollectionSharder(dict(params)), group, device, cut)
    loss_tolerance = LOSS_TOLERANCE.get(optimizer, LOSS_TOLERANCE["adagrad"])
    for chosen in options:
        sharder = OverlapEmbeddingBagCollectionSharder(dict(params), slice_bags=4, **chosen)
        ours = train(kind, take, sharder, group, device, cut)
        what = f"{usage}, {optimizer}, {chosen}:"
        assert list(ours) == list(torchrec), what
        for name, tensor in torchrec.items():
            if name.startswith("loss"):
                tolerance = loss_tolerance
            else:
                has_moments = "momentum1" in name and ("adam" in optimizer or "lamb" in optimizer)
                tolerance = WEIGHT_TOLERANCE["first_moments" if has_moments else "fp32"]
            assert_near(ours[name], tensor, tolerance, f"{what} {name}")
        if cut and optimizer == "sgd":  # a row-wise state differs if columns are cut
            losses = train(kind, take, sharder, group, device)
            for name in (name for name in torchrec if name.startswith("loss")):
                assert_near(losses[name], torchrec[name], loss_tolerance, f"{what} whole tables, {name}")


class Evaluated(Tower):
    """Takes the batches of TorchRec's pipelines."""

    def forward(self, batch: data.Batch) -> tuple[torch.Tensor, torch.Tensor]:
        pooled = self.pooled(batch.sparse)
        hidden = pooled * self.dense(batch.dense)
        return hidden.mean(), hidden


def evaluate_in_pipeline(
    name: str, options: Sequence[Mapping[str, Any]], group: dist.ProcessGroup, device: torch.device, steps: int = 24
) -> None:
    """Check that a pipeline of TorchRec's for GPUs evaluates under our sharder as TorchRec does without a pipeline.

    Ranks are slow in turns. TorchRec's outputs in these pipelines are no reference: a race between their streams can
    overwrite them.
    """

    def evaluate(sharder: ModuleSharder, in_pipeline: bool = True) -> list[torch.Tensor]:
        tower, model = _shard(Evaluated, sharder, group, device)
        calls = itertools.count()

        def hesitate(*_: Any) -> None:
            if next(calls) % group.size() == group.rank():
                torch.cuda._sleep(2_000_000)  # about a millisecond

        tower.dense.register_forward_pre_hook(hesitate)
        model.eval()
        given = list(_batches(group.rank(), torch.device("cpu")))
        batches = (data.Batch(dense, ids, torch.empty(0)) for dense, ids, _ in itertools.cycle(given))
        batches = itertools.islice(batches, steps)
        with torch.no_grad():
            if in_pipeline:
                optimizer = torch.optim.SGD(tower.dense.parameters(), lr=0.0)
                pipeline = getattr(train_pipelines, name)(model, optimizer, device)
                outputs = [pipeline.progress(batches) for _ in range(steps)]
            else:
                outputs = [model(batch.to(device))[1] for batch in batches]
        torch.cuda.synchronize(device)
        for exchange in exchanges(model):
            exchange.close()
        return outputs

    expected = evaluate(EmbeddingBagCollectionSharder(), in_pipeline=False)
    for chosen in options:
        ours = evaluate(OverlapEmbeddingBagCollectionSharder(slice_bags=4, **chosen))
        for step, (actual, wanted) in enumerate(zip(ours, expected, strict=True)):
            assert_near(actual, wanted, WEIGHT_TOLERANCE["fp32"], f"{name}, {chosen}: step {step}")
