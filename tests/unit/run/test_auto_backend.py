"""`embedding.backend: auto`: which backend it takes, why, and what follows from it."""

import json
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml

from dlrm_overlap.checkpoint.manifest import read_manifest
from dlrm_overlap.comm.reach import Reach
from dlrm_overlap.config import Config, EmbeddingConfig
from dlrm_overlap.embedding.sharded_module import exchanges
from dlrm_overlap.kernels import flags
from dlrm_overlap.simulate.config import SimulateConfig
from dlrm_overlap.torchrec_private.check import refusal
from dlrm_overlap.train import auto_backend
from dlrm_overlap.train.auto_backend import kernel_fault, why_not_pgas
from dlrm_overlap.train.trainer import Trainer
from tests.conftest import refuses
from tests.distributed.models import CPU
from tests.distributed.workers import make_trainer, quickstart

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]

SMALL = ["--train.batch_size", "32", "--train.steps", "2", "--train.eval_every", "0", "--data.eval_samples", "64"]
APART = "2 nodes (rank 0, rank 1; 2 machines)"


def _config(folder: Path, *options: str) -> Config:
    return quickstart(folder, "run", *SMALL, "--embedding.backend", "auto", *options)


def _unnamed(folder: Path, *options: str) -> Config:
    config = _config(folder, *options)
    return replace(config, log=replace(config.log, name=None))


def _close(trainer: Trainer) -> Trainer:
    trainer.close()
    return trainer


@pytest.fixture
def other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level("INFO", "dlrm_overlap")
    return lambda: [line for line in caplog.messages if line.startswith("backend auto")]


def test_it_is_the_default() -> None:
    assert EmbeddingConfig().backend == "auto"


def test_it_takes_pgas_where_that_works(tmp_path: Path, lines: Any) -> None:
    trainer = _close(make_trainer(_config(tmp_path)))
    assert trainer.embedding.backend == "pgas"
    assert [exchange.options.backend for exchange in exchanges(trainer.model)] == ["pgas"]
    assert lines() == ["backend auto: pgas, which works here: 1 node (rank 0; 1 machine)"]


def test_another_backend_is_kept_and_not_told(tmp_path: Path, lines: Any) -> None:
    for backend in ("torchrec", "fused"):
        trainer = _close(make_trainer(quickstart(tmp_path, "run", *SMALL, "--embedding.backend", backend)))
        assert trainer.embedding.backend == backend
    assert lines() == []


@pytest.mark.usefixtures("other_machine")
def test_it_takes_torchrec_on_other_processors(tmp_path: Path, lines: Any) -> None:
    trainer = _close(make_trainer(_config(tmp_path)))
    assert trainer.embedding.backend == "torchrec"
    assert exchanges(trainer.model) == []
    why = "ranks on CPUs rely on the store order of x86-64, and this is aarch64"
    assert lines() == [f"backend auto: torchrec, not pgas: {why}"]


def test_it_takes_torchrec_if_no_table_would_be_exchanged(tmp_path: Path, lines: Any) -> None:
    wide = ["--model.dim", "1028", "--model.bottom_mlp", "[4,1028]"]
    trainer = _close(make_trainer(_config(tmp_path, *wide)))
    assert trainer.embedding.backend == "torchrec"
    why = "all tables would stay with TorchRec: shards of more than 1024 columns"
    assert lines() == [f"backend auto: torchrec, not pgas: {why}"]


def test_it_takes_torchrec_between_nodes_unless_they_are_emulated(world_of_one: dist.ProcessGroup) -> None:
    apart = Reach(0, (range(1), range(1, 2)), "2 machines")
    why = why_not_pgas(apart, world_of_one, CPU, is_emulated=False)
    assert why == f"{APART}, and messages between nodes were tested on emulated nodes only"
    assert why_not_pgas(apart, world_of_one, CPU, is_emulated=True) is None


def test_it_takes_torchrec_on_gpus_where_kernels_do_not_run(
    world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto_backend, "kernel_fault", lambda device: f"kernels do not run on {device} (..)")
    found = why_not_pgas(Reach.of_one_node(world_of_one), world_of_one, torch.device("cuda", 0), is_emulated=False)
    assert found == "kernels do not run on cuda:0 (..)"


def test_it_takes_torchrec_with_libraries_that_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Any
) -> None:
    def changed() -> None:
        raise refusal(["KJTList is gone"], ", or embedding.backend: torchrec")

    monkeypatch.setattr(auto_backend, "check_private_api", changed)
    assert _close(make_trainer(_config(tmp_path))).embedding.backend == "torchrec"
    (line,) = lines()
    assert re.fullmatch(r"backend auto: torchrec, not pgas: TorchRec [\d.]+\S*: KJTList is gone", line)


def test_what_keeps_kernels_from_running_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernel_fault(CPU) is None, "the interpreter runs them"

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify one")

    with monkeypatch.context() as patch:
        patch.setattr(flags, "signal_flags", lambda *_, **__: None)
        assert kernel_fault(CPU) == "a kernel on cpu stored 0 instead of 1"
        patch.setattr(flags, "signal_flags", fail)
        why = "RuntimeError: Failed to find C compiler. Please specify one"
        assert kernel_fault(CPU) == f"kernels do not run on cpu ({why})"
    monkeypatch.setitem(sys.modules, "dlrm_overlap.kernels.flags", None)
    assert "kernels do not run on cpu (ModuleNotFoundError: " in (kernel_fault(CPU) or "")


def test_a_mistake_stays_an_error(tmp_path: Path) -> None:
    with refuses("embedding.nodes: 2 emulated nodes do not divide 1 ranks"):
        make_trainer(_config(tmp_path, "--embedding.nodes", "2"))
    with refuses("embedding.memory: 2 values for 8 tables"):
        make_trainer(_config(tmp_path, "--embedding.memory", "[gpu,cached]"))
    with refuses("embedding.backend: auto depends on"):
        SimulateConfig(replace(_config(tmp_path)).model, _config(tmp_path).data, EmbeddingConfig())


def test_the_wire_type_follows_the_backend_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = _close(make_trainer(_config(tmp_path, "--train.precision", "bf16")))
    assert [exchange.options.wire_dtype for exchange in exchanges(trainer.model)] == [torch.bfloat16]
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    trainer = _close(make_trainer(_config(tmp_path, "--train.precision", "bf16")))
    assert trainer.embedding.resolved_wire_dtype("bf16") == "fp32"


def test_the_run_is_named_auto_and_its_results_name_the_backend_in_use(tmp_path: Path) -> None:
    saves = ["--checkpoint.last", "true"]
    trainer = make_trainer(_unnamed(tmp_path, *saves))
    trainer.fit()
    _close(trainer)
    folder = tmp_path / "auto"
    assert json.loads((folder / "summary.json").read_text())["backend"] == "pgas"
    assert yaml.safe_load((folder / "config.yaml").read_text())["embedding"]["backend"] == "auto"
    about = read_manifest(folder / "checkpoints" / "step_2").about
    assert (about["backend"], about["config"]["embedding"]["backend"]) == ("pgas", "auto")


def test_runs_resume_under_another_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saves = ["--checkpoint.last", "true"]
    for step, backend, machine in ((2, "auto", "x86_64"), (4, "torchrec", "x86_64"), (6, "auto", "aarch64")):
        monkeypatch.setattr(platform, "machine", lambda machine=machine: machine)
        options = [*saves, "--train.steps", str(step), "--embedding.backend", backend]
        trainer = make_trainer(_config(tmp_path, *options))
        summary = trainer.fit()
        assert (trainer.start, summary["steps"]) == (step - 2, step)
        assert summary["backend"] == ("pgas" if step == 2 else "torchrec")
        _close(trainer)
