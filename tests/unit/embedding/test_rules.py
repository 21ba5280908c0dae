"""The numbers of the rows' optimizers: kept for a step that is under way, or overwritten for captured steps."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode

from dlrm_overlap.embedding import steps
from dlrm_overlap.embedding.backends.rows import DeviceRules
from dlrm_overlap.embedding.steps import UpdateRule

DECOUPLE = WeightDecayMode.DECOUPLE
REST = [0.0, 0.25, torch.finfo(torch.float32).max]  # L2 decay, decoupled decay, and no bound of the norm


def _rules(*learning_rates: float, eps: float = 0.5) -> list[UpdateRule]:
    arguments: Any = SimpleNamespace(eps=eps, weight_decay=0.25, weight_decay_mode=DECOUPLE.value, max_norm=0.0)
    return [UpdateRule(rate, arguments) for rate in learning_rates]


def _device_rules() -> DeviceRules:
    return DeviceRules(torch.device("cpu"))


def test_an_eager_step_keeps_the_numbers_of_its_forward() -> None:
    device = _device_rules()
    first = device.numbers(_rules(0.25, 0.75), 1)
    assert (first.tolist(), first.dtype) == ([0.75, 0.5, *REST], torch.float32)
    assert device.numbers(_rules(0.25, 2.0), 1).tolist() == [2.0, 0.5, *REST]
    assert first.tolist() == [0.75, 0.5, *REST], "a step under way reads it"
    assert device.numbers(_rules(0.75), 0) is first, "the same numbers are made once"
    assert device.numbers(_rules(0.75, eps=0.25), 0).tolist() == [0.75, 0.25, *REST]


def test_a_schedule_does_not_fill_the_memory() -> None:
    device = _device_rules()
    with patch.object(steps, "_MOST", 3):
        made = [device.numbers(_rules(float(rate)), 0) for rate in range(10)]
    assert [numbers.tolist() for numbers in made] == [[float(rate), 0.5, *REST] for rate in range(10)]
    assert len(device._by_value) <= 3


def test_captured_steps_read_one_memory() -> None:
    device = _device_rules()
    device.keep_in_place(_rules(0.25, 0.75))
    places = [device.numbers(_rules(9.0, 9.0), lookup) for lookup in range(2)]
    assert [place.tolist() for place in places] == [[0.25, 0.5, *REST], [0.75, 0.5, *REST]], (
        "those last kept, not the step's own"
    )
    device.keep_in_place(_rules(0.25, 3.0))
    assert [place.tolist() for place in places] == [[0.25, 0.5, *REST], [3.0, 0.5, *REST]]
    assert all(device.numbers(_rules(9.0, 9.0), lookup) is place for lookup, place in enumerate(places))


def test_only_what_has_changed_is_written() -> None:
    device = _device_rules()
    device.keep_in_place(_rules(0.25, 0.75))
    with patch.object(device, "_write") as write:
        device.keep_in_place(_rules(0.25, 0.75))
        write.assert_not_called()
        device.keep_in_place(_rules(0.25, 1.0))
        write.assert_called_once_with(device.numbers([], 1), (1.0, 0.5, *REST))


def test_a_rank_without_tables_has_no_numbers() -> None:
    device = _device_rules()
    device.keep_in_place([])
    device.keep_in_place([])
