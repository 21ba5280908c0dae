"""The numbers of the rows' optimizers: kept for a step that is under way, or overwritten for captured steps."""

from types import SimpleNamespace
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from dlrm_overlap.embedding.backends.rows import DeviceRules
from dlrm_overlap.embedding.steps import UpdateRule
from dlrm_overlap.kernels.arguments import Numbers

DECOUPLE = WeightDecayMode.DECOUPLE
REST = list(Numbers(0.0, decoupled=0.25, beta1=0.5, beta2=0.75, halflife=-1.0, decay_after=-1.0, most_rate=1.0))[2:]


def _rules(*learning_rates: float, eps: float = 0.5, count: int = 0) -> list[UpdateRule]:
    arguments: Any = SimpleNamespace(
        eps=eps, weight_decay=0.25, weight_decay_mode=DECOUPLE.value, max_norm=0.0, beta1=0.5, beta2=0.75,
        counter_halflife=-1, adjustment_iter=-1, adjustment_ub=1.0,
    )  # fmt: skip
    return [UpdateRule(rate, arguments, count=count) for rate in learning_rates]


def _device_rules() -> DeviceRules:
    return DeviceRules(torch.device("cpu"))


def test_an_eager_step_keeps_the_numbers_of_its_forward() -> None:
    device = _device_rules()
    first = device.numbers(_rules(0.25, 0.75), 1, 0)
    assert (first.tolist(), first.dtype) == ([0.75, 0.5, *REST], torch.float32)
    assert device.numbers(_rules(0.25, 2.0), 1, 0).tolist() == [2.0, 0.5, *REST]
    assert first.tolist() == [0.75, 0.5, *REST], "a step under way reads it"
    assert device.numbers(_rules(0.75), 0, 0) is first, "the same numbers are made once"
    assert device.numbers(_rules(0.75, eps=0.25), 0, 0).tolist() == [0.75, 0.25, *REST]


def test_captured_steps_read_one_memory() -> None:
    device = _device_rules()
    device.keep_in_place(_rules(0.25, 0.75), 0)
    places = [device.numbers(_rules(9.0, 9.0), lookup, 0) for lookup in range(2)]
    assert [place.tolist() for place in places] == [[0.25, 0.5, *REST], [0.75, 0.5, *REST]], (
        "those last kept, not the step's own"
    )
    device.keep_in_place(_rules(0.25, 3.0), 0)
    assert [place.tolist() for place in places] == [[0.25, 0.5, *REST], [3.0, 0.5, *REST]]
    assert all(device.numbers(_rules(9.0, 9.0), lookup, 0) is place for lookup, place in enumerate(places))


def test_the_count_is_that_of_step_0() -> None:
    """Which kernels add to the step's number, so that neither eager nor captured steps need other numbers each."""
    device, count = _device_rules(), Numbers._fields.index("count")
    first = device.numbers(_rules(0.25, count=103), 0, 100)
    assert first[count] == 3
    assert device.numbers(_rules(0.25, count=104), 0, 101) is first
    assert device.numbers(_rules(0.25, count=106), 0, 102)[count] == 4, "after an evaluation, which counts"
