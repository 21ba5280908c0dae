"""The numbers of the rows' optimizers, which steps overwrite where they have changed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import CounterWeightDecayMode, WeightDecayMode

from dlrm_overlap.embedding.backends.rows import DeviceRules
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.kernels.optimizer_params import OptimizerParams

DECOUPLE = WeightDecayMode.DECOUPLE
REST = list(OptimizerParams(0.0, decoupled=0.25, beta1=0.5, beta2=0.75, halflife=-1.0, decay_after=-1.0, max_rate=1.0))[
    2:
]


def _rules(*learning_rates: float, eps: float = 0.5, count: int = 0) -> list[UpdateRule]:
    arguments: Any = SimpleNamespace(
        eps=eps, weight_decay=0.25, weight_decay_mode=DECOUPLE.value, max_norm=0.0, beta1=0.5, beta2=0.75,
        counter_halflife=-1, adjustment_iter=-1, adjustment_ub=1.0,
    )  # fmt: skip
    return [UpdateRule(rate, arguments, count=count) for rate in learning_rates]


def _device_rules() -> DeviceRules:
    return DeviceRules(torch.device("cpu"))


def test_all_steps_read_one_memory() -> None:
    device = _device_rules()
    device.follow(_rules(0.25, 0.75), 0)
    places = [device.numbers(lookup) for lookup in range(2)]
    assert [place.tolist() for place in places] == [[0.25, 0.5, *REST], [0.75, 0.5, *REST]]
    device.follow(_rules(0.25, 3.0, eps=0.25), 0)
    assert [place.tolist() for place in places] == [[0.25, 0.25, *REST], [3.0, 0.25, *REST]]
    assert all(device.numbers(lookup) is place for lookup, place in enumerate(places))


def test_the_count_is_that_of_step_0() -> None:
    """Which kernels add to the step's number, so that neither eager nor captured steps need other numbers each."""
    device, count = _device_rules(), OptimizerParams._fields.index("count")
    for step, counted, expected in ((100, 103, 3), (101, 104, 3), (102, 106, 4)):  # the last after an evaluation
        device.follow(_rules(0.25, count=counted), step)
        assert device.numbers(0)[count] == expected


@pytest.mark.parametrize(
    ("mode", "always_decays", "expected"),
    [
        (WeightDecayMode.NONE, False, (0.0, 0.0, 0.0)),
        (WeightDecayMode.L2, False, (0.25, 0.0, 0.0)),
        (WeightDecayMode.DECOUPLE, False, (0.0, 0.25, 0.0)),
        (CounterWeightDecayMode.ADAGRADW, False, (0.0, 0.25, 1.0)),
        (WeightDecayMode.NONE, True, (0.0, 0.25, 0.0)),
        (WeightDecayMode.L2, True, (0.0, 0.25, 0.0)),
        (WeightDecayMode.DECOUPLE, True, (0.0, 0.25, 0.0)),
    ],
)
def test_rows_decay_as_the_mode_says_but_those_of_adam_and_lamb_always_do(
    mode: Any, always_decays: bool, expected: tuple[float, float, float]
) -> None:
    (rule,) = _rules(0.5)
    rule.arguments.weight_decay_mode = mode.value
    numbers = rule._replace(always_decays=always_decays).numbers
    assert (numbers.l2, numbers.decoupled, numbers.lazy) == expected
