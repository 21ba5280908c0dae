"""Programs of TorchRec's users give stock's losses under the captured step's logic."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError
from dlrm_overlap.kernels.compiled import INTERPRETED
from tests.distributed.captured import captures
from tests.distributed.foreign import KEYS, PROGRAMS, SAMPLES, STEPS, Plain, Program, compare, train
from tests.distributed.models import CPU, world
from tests.distributed.workers import cases_on_ranks

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")


def _compare(name: str) -> None:
    with captures() as taken:
        compare(name, world(), CPU)
    assert taken == {"captured": 2, "replayed": STEPS - 3 - 2}


class Twice(Plain):
    """Calls one collection twice in a step."""

    def pooled(self, batch: Any) -> torch.Tensor:
        return super().pooled(batch) + super().pooled(batch)


class FewerSamples(Plain):
    """Makes ids of its own, of fewer samples than the bound names; another rank might make others."""

    def pooled(self, batch: Any) -> torch.Tensor:
        ids = KeyedJaggedTensor(KEYS, batch.ids.values()[:0], lengths=torch.zeros(4 * (SAMPLES - 1)).int())
        return super().pooled(replace(batch, ids=ids))


@pytest.mark.parametrize(
    ("model", "refused"),
    [(Twice, "calls an embedding collection twice in a step"), (FewerSamples, "5 samples in a training step, but")],
)
@pytest.mark.usefixtures("world_of_one")
def test_what_would_go_wrong_later_is_refused_in_the_first_step(model: type[Plain], refused: str) -> None:
    with pytest.raises(InputError, match=refused):
        train(Program(model), True, world(), CPU)


# What every `make test` runs; the rest differs little from it.
QUICK = [
    "split",
    "two_sets_fixed",
    "one_feature",
    "slotted_batch",
    "clipped_adamw",
    "momentum",
    "in_host_memory",
    "collection_in_host_memory",
    "data_parallel_collection",
    "growing_bags",
]
MORE = [name for name in PROGRAMS if name not in QUICK]
ended, more_ended = cases_on_ranks(2, _compare, QUICK), cases_on_ranks(2, _compare, MORE)


@pytest.mark.parametrize("name", QUICK)
def test_as_under_stock(ended: Callable[[str], None], name: str) -> None:
    ended(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_as_under_stock_too(more_ended: Callable[[str], None], name: str) -> None:
    more_ended(name)
