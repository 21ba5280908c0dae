"""What ranks ask each other before a call, and what they do not."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from dlrm_overlap.comm.collectives import PeerCollectives


class _Untold:
    def __str__(self) -> str:
        raise AssertionError("the host writes a text for nobody")


@pytest.mark.parametrize("known", [False, True])
def test_a_call_between_gpus_takes_the_host_no_text(known: bool) -> None:
    ranks, call = MagicMock(), _Untold()
    ranks.size.return_value = 2
    collectives: Any = SimpleNamespace(_known={call} if known else set(), _group=ranks, device=torch.device("cuda"))
    assert PeerCollectives._is_known(collectives, call) == known  # type: ignore[arg-type]
