"""`PeerCollectives` after a call that has failed, on one rank."""

from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.comm.collectives import PeerCollectives
from dlrm_overlap.comm.flows import HostFlow
from dlrm_overlap.comm.record import ExchangeTimeoutError


def _expires(*_: Any) -> NoReturn:
    raise ExchangeTimeoutError([0, 1, 0, 2, 1], 0.3)


@pytest.mark.parametrize("part", ["begin", "wait"])
def test_a_call_that_has_failed_between_the_ranks_is_the_last(
    part: str, world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers may wait for its rows, and would take those of a later call for them."""
    collectives = PeerCollectives(world_of_one, torch.device("cpu"), 1 << 10)
    output, sent = collectives.empty((1, 4), torch.float32), torch.ones(1, 4)
    with monkeypatch.context() as patch:
        patch.setattr(HostFlow, part, _expires)
        with pytest.raises(ExchangeTimeoutError):
            collectives.all_to_all(output, sent).wait()
    with pytest.raises(AssertionError, match="peers would take this call's rows for those of the one before"):
        collectives.all_gather(output, sent[0])
    collectives.close()
