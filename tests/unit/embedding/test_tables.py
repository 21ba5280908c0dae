"""The oracle of the rows' update against torch's own optimizers, and by hand where torch has none."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn

from dlrm_overlap.embedding.backends.rows import DeviceRules
from dlrm_overlap.embedding.layout import EVERY_RANK
from dlrm_overlap.embedding.replicated import ReplicatedGradients, ReplicatedTables
from dlrm_overlap.embedding.tables import LocalTables, max_gradients
from dlrm_overlap.kernels.optimizer_params import OptimizerParams
from dlrm_overlap.kernels.reference import update_rows
from tests.agreement import WEIGHT_TOLERANCE, assert_near, assert_same
from tests.unit.embedding.shards import make_shard

ROWS, DIM, STEPS = 50, 12, 3
LR, EPS = 0.5, 0.25
NUMBERS = OptimizerParams(LR, EPS, decoupled=0.125, beta1=0.5, beta2=0.75)
OPTIMIZERS = {
    "sgd": (partial(torch.optim.SGD, lr=LR), []),
    "adagrad": (partial(torch.optim.Adagrad, lr=LR, eps=EPS, initial_accumulator_value=0.0), ["sum"]),
    "adam": (
        partial(torch.optim.AdamW, lr=LR, eps=EPS, betas=(0.5, 0.75), weight_decay=0.125),
        ["exp_avg", "exp_avg_sq"],
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_against_torchs_optimizer_on_dense_gradients(name: str) -> None:
    """Those whose states move without a gradient, too, agree where ids name every row in every step."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(ROWS, DIM, generator=generator)
    before, expected = weight.clone(), nn.Parameter(weight.clone())
    make, keys = OPTIMIZERS[name]
    states = [torch.zeros(ROWS, DIM) for _ in keys]
    optimizer = make([expected])
    named = []
    for step in range(STEPS):
        ids = torch.randint(0, 30, (40,), generator=generator)  # some twice, those from 30 on never
        if name == "adam":
            ids = torch.cat((ids, torch.arange(ROWS)))
        gradient = torch.randn(ids.numel(), DIM, generator=generator)
        update_rows(weight, states, ids, gradient, name, NUMBERS._replace(count=step + 1))
        optimizer.zero_grad()
        (expected[ids] * gradient).sum().backward()
        optimizer.step()
        named.append(ids)
    assert_near(weight, expected.detach(), WEIGHT_TOLERANCE["fp32"], "weight")
    for key, state in zip(keys, states, strict=True):
        assert_near(state, optimizer.state[expected][key], WEIGHT_TOLERANCE["fp32"], key)
    others = torch.cat(named).bincount(minlength=ROWS) == 0
    assert_same(weight[others], before[others], "rows that no id names")


def test_rowwise_adagrad_by_hand() -> None:
    weight = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    state = torch.tensor([8.0, 7.0, 0.0])
    gradient = torch.tensor([[1.0, 1.0], [0.0, -4.0], [2.0, 4.0]])
    update_rows(weight, [state], torch.tensor([0, 2, 0]), gradient, "rowwise_adagrad", OptimizerParams(0.5, 5.0))
    # Row 0: [3, 5] in sum, 17 in mean square, 25 with what was there: 0.5 / (5 + 5) of it. Row 2: 8, from nothing.
    assert_same(state, torch.tensor([25.0, 7.0, 8.0]), "state")
    row_2 = 6 + 0.5 * 4 / (8**0.5 + 5)
    assert_near(weight, torch.tensor([[0.85, 1.75], [3.0, 4.0], [5.0, row_2]]), WEIGHT_TOLERANCE["fp32"], "weight")


def test_half_precision_rows_are_rounded_once() -> None:
    weight = torch.ones(1, 4).half()  # below 1, float16 lie 2**-11 apart
    update_rows(weight, [], torch.tensor([0, 0]), torch.full((2, 4), 0.3 * 2**-11), "sgd", OptimizerParams(1.0))
    assert_same(weight, torch.full((1, 4), 1 - 2**-11).half(), "weight")


def test_partial_rowwise_adam_and_lamb_by_hand() -> None:
    """One row, mean 1 and mean square 3 before step 2; betas 1/2 and 3/4, which correct by 3/4 and 7/16."""
    for name, ratio in (("partial_rowwise_adam", 1.0), ("partial_rowwise_lamb", 0.0)):
        weight, states = torch.tensor([[3.0, -4.0]]), [torch.ones(1, 2), torch.tensor([3.0])]
        numbers = OptimizerParams(lr=0.5, decoupled=0.25, beta1=0.5, beta2=0.75, count=2)
        update_rows(weight, states, torch.tensor([0]), torch.tensor([[3.0, -1.0]]), name, numbers)
        # Means (2, 0); mean square 9/4 + 5/4 = 7/2, 8 when corrected: the mean's 8/3 is divided by sqrt(8).
        assert_same(states[0], torch.tensor([[2.0, 0.0]]), name)
        assert_same(states[1], torch.tensor([3.5]), name)
        direction = torch.tensor([[8 / 3 / 8**0.5 + 0.25 * 3, 0.25 * -4]])
        if name == "partial_rowwise_lamb":
            ratio = 5 / float(direction.norm())
        assert_near(weight, torch.tensor([[3.0, -4.0]]) - 0.5 * ratio * direction, WEIGHT_TOLERANCE["fp32"], name)


def test_rowwise_adagrad_with_a_counter_by_hand() -> None:
    """A row of counter 4 that step 3 updated before step 5, and one at its first step; counters halve in 2 steps."""
    weight, gradient = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[3.0, 1.0], [2.0, 0.0]])
    states = [torch.tensor([4.0, 2.0]), torch.tensor([3.0, 0.0]), torch.tensor([4.0, 0.0])]
    numbers = OptimizerParams(lr=0.5, decoupled=0.25, count=5, halflife=2, decay_after=4)
    update_rows(weight, states, torch.tensor([0, 1]), gradient, "rowwise_adagrad_with_counter", numbers)
    # Mean squares 5 and 2: roots 3 and 2. Counters 1 + 4 / 2 and 1: a row decays by halflife / counter of 1/8.
    assert_near(states[0], torch.tensor([9.0, 4.0]), WEIGHT_TOLERANCE["fp32"], "sums")
    assert_near(states[1], torch.tensor([5.0, 5.0]), WEIGHT_TOLERANCE["fp32"], "last steps")
    assert_near(states[2], torch.tensor([3.0, 1.0]), WEIGHT_TOLERANCE["fp32"], "counters")
    shrunk = torch.tensor([[11 / 12, 22 / 12], [3.0, 6.0]])
    expected = shrunk - torch.tensor([[0.5, 1 / 6], [0.5, 0.0]])
    assert_near(weight, expected, WEIGHT_TOLERANCE["fp32"], "weight")


def test_only_lookups_that_clip_have_a_bound() -> None:
    assert max_gradients([{"gradient_clipping": True, "max_gradient": 0.5}, {"gradient_clipping": True}]) == {0.5, 1.0}
    assert max_gradients([{"max_gradient": 0.5}, {}]) == {None}


def test_steps_are_counted_once_each_also_those_that_were_replayed() -> None:
    """Adam's bias correction depends on the count. Step 4 was the first, and 6 to 8 were replays of captured steps."""
    tables, lookup = LocalTables([]), SimpleNamespace(iter=torch.tensor([7]), iter_cpu=torch.zeros(1).long())
    tables._counting = [lookup]
    for step, count in ((4, 8), (5, 9), (9, 13), (9, 13), (10, 14)):
        tables.rules(step)
        assert int(lookup.iter_cpu) == count, f"step {step}, after the 7 of a checkpoint"


def test_an_evaluation_counts_as_a_forward_of_fbgemm() -> None:
    """The trainer subtracts such forwards again, see `StepRunner`."""
    tables, lookup = LocalTables([]), SimpleNamespace(iter=torch.tensor([7]), iter_cpu=torch.tensor([7]))
    assert not tables.count_evaluation()
    tables._counting = [lookup]
    assert tables.count_evaluation()
    assert (int(lookup.iter), int(lookup.iter_cpu)) == (8, 8)


def test_the_numbers_of_a_rule_on_the_device_are_those_of_the_step_and_count_from_step_0() -> None:
    """Kernels add the step's number, also in replays; every number may change, and each lookup has its own."""
    rules, counting = DeviceRules(torch.device("cpu")), NUMBERS._replace(count=9)
    for given, step in ((NUMBERS, 4), (NUMBERS._replace(eps=2.0), 5), (NUMBERS._replace(eps=2.0, l2=0.5), 6)):
        alone: Any = SimpleNamespace(numbers=given, count=0)
        counts: Any = SimpleNamespace(numbers=counting._replace(count=9 + step), count=9 + step)
        rules.follow([alone, counts], step)
        assert rules.numbers(0).tolist() == pytest.approx(given)
        assert rules.numbers(1).tolist() == pytest.approx(counting)


@pytest.mark.parametrize(
    ("mode", "max_norm", "expected"),
    [
        (WeightDecayMode.NONE, 0.0, "rowwise_adagrad"),
        (WeightDecayMode.NONE, 2.0, "decaying_rowwise_adagrad"),
        (WeightDecayMode.L2, 0.0, "decaying_rowwise_adagrad"),
        (WeightDecayMode.DECOUPLE, 2.0, "decaying_rowwise_adagrad"),
    ],
)
def test_a_kernel_that_decays_is_taken_for_decay_and_for_limits_of_norms(
    mode: WeightDecayMode, max_norm: float, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, state, none = torch.rand(3, 4), torch.rand(3), torch.empty(0)
    arguments = SimpleNamespace(weight_decay_mode=mode.value, max_norm=max_norm)
    memory = {"weights_dev": rows.flatten(), "weights_uvm": none, "momentum1_dev": state, "momentum1_uvm": none}
    tables, shard = LocalTables([]), make_shard("t", 0, 4)
    lookup: Any = SimpleNamespace(optimizer_args=arguments, stochastic_rounding=True, **memory)
    tables.lookups = [lookup]
    monkeypatch.setattr(tables, "optimizer", lambda shard: "rowwise_adagrad")
    monkeypatch.setattr(tables, "_tensors", lambda shard: [rows, state])
    found = tables.stored(shard)
    assert (found.optimizer, found.stochastic_rounding) == (expected, True)
    assert found.weights.data_ptr() == rows.data_ptr()
    assert [each.data_ptr() for each in found.states] == [state.data_ptr()]


def test_replicated_tables_of_a_lookup_are_parts_of_its_parameter() -> None:
    """Tables of 3 rows of 4 and 2 rows of 8; their gradients are views of the parameter's, made when they are asked."""
    flat = nn.Parameter(torch.arange(28.0))
    lookup = SimpleNamespace(weights=flat, embedding_specs=[(3, 4), (2, 8)], weights_physical_offsets=[0, 12])
    shards = make_shard("a", EVERY_RANK, 4), make_shard("b", EVERY_RANK, 8, table=1)
    rows = [ReplicatedTables([lookup], []).weight(shard) for shard in shards]
    assert torch.equal(rows[0], flat[:12].view(3, 4))
    assert torch.equal(rows[1], flat[12:].view(2, 8))
    gradients = ReplicatedGradients([lookup], [])
    for number, shard in enumerate(shards):
        gradients.weight(shard).fill_(number + 1.0)
    assert flat.grad is not None
    assert flat.grad.tolist() == [1.0] * 12 + [2.0] * 16
    assert gradients.stored(shards[1]).weights is flat.grad
