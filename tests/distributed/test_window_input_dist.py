"""Ids through windows in TorchRec's pipelines: what is trained has the same bits as if TorchRec had sent the ids."""

from collections.abc import Callable

import pytest

from tests.distributed.models import CPU
from tests.distributed.window_inputs import CASES, compare
from tests.distributed.workers import cases_on_ranks


def _compare(name: str) -> None:
    compare(name, CPU)


ended = cases_on_ranks(2, _compare, list(CASES))


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_with_torchrecs_input_dist(ended: Callable[[str], None], name: str) -> None:
    ended(name)
