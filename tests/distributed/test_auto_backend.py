"""Two ranks agree on the backend that `auto` takes, also if only one of them cannot use pgas."""

import os
import platform
from pathlib import Path

import pytest
import torch.distributed as dist

from dlrm_overlap.embedding.sharded_module import exchanges
from tests.distributed.workers import logged_messages, make_trainer, quickstart, run_ranks

OPTIONS = ["--train.batch_size", "32", "--data.eval_samples", "64", "--embedding.backend", "auto"]


def _chosen(folder: Path) -> tuple[str, set[str], list[str]]:
    """Return the backend, the exchanges' backends, and what the log says of the choice on this rank."""
    messages = logged_messages()
    trainer = make_trainer(quickstart(folder, "run", *OPTIONS))
    used = {exchange.options.backend for exchange in exchanges(trainer.model)}
    trainer.close()
    return trainer.embedding.backend, used, [line for line in messages if line.startswith("backend auto")]


def _work(folder: Path) -> None:
    rank = dist.get_rank()
    assert _chosen(folder)[:2] == ("pgas", {"pgas"})
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(platform, "machine", lambda: "aarch64")
        why = "ranks on CPUs rely on the store order of x86-64, and this is aarch64"
        assert _chosen(folder) == ("torchrec", set(), [f"backend auto: torchrec, not pgas: {why}"][rank:])
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:  # as in another container, or of another user
            opened = os.open
            patch.setattr(os, "open", lambda path, *rest: opened("/no/such" if "/fd/" in path else path, *rest))
        backend, used, _ = _chosen(folder)
        assert (backend, used) == ("torchrec", set())


def test_ranks_agree_if_one_of_them_cannot_use_pgas(tmp_path: Path) -> None:
    run_ranks(_work, 2, tmp_path)
