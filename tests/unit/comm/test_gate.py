"""Work that is timed begins on all ranks together, behind a wait for the host."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from dlrm_overlap.bench.harness.timing import begin_together


def test_ranks_meet_behind_the_wait_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    issued: list[str] = []
    made = torch.zeros(1)

    def make(size: int, device: object) -> torch.Tensor:
        issued.append("fill")
        return made

    def meet(number: torch.Tensor, group: object) -> None:
        assert number is made
        issued.append(f"meet {group}")

    monkeypatch.setattr(torch, "zeros", make)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: issued.append(f"wait {cycles}"))
    monkeypatch.setattr(dist, "all_reduce", meet)
    group, gpu = "ranks", SimpleNamespace(type="cuda")
    begin_together(group, gpu, 1.5)  # type: ignore[arg-type]
    assert issued == ["fill", "wait 3000000", "meet ranks"]
