"""Contenders of `bench step` with settings that no key expresses."""

from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import TrainPipelinePT2, TrainPipelineSparseDist
from torchrec.modules.crossnet import LowRankCrossNet

from dlrm_overlap.bench.figures import step
from dlrm_overlap.bench.harness import torchrec_variants
from dlrm_overlap.bench.harness.training_runs import TrainingRun, read_batches
from dlrm_overlap.bench.harness.workload import with_keys
from dlrm_overlap.bench.step_contenders import STEP_CONTENDERS
from dlrm_overlap.config import Config
from dlrm_overlap.train.trainer import Trainer
from tests.distributed.workers import quickstart, ranks_here

CPU = torch.device("cpu")


@pytest.mark.parametrize("bf16", [False, True])
def test_cast_biases_change_the_dtype_alone(bf16: bool) -> None:
    torch.manual_seed(1)
    theirs = LowRankCrossNet(24, 3, 4)
    for bias in theirs.bias:
        torch.nn.init.normal_(bias)
    ours = torchrec_variants.CastBiasesCrossNet(theirs)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    x = torch.randn(8, 24, dtype=torch.bfloat16 if bf16 else torch.float32)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        expected, found = theirs(x), ours(x)
    assert (expected.dtype, found.dtype) == (torch.float32, x.dtype)
    torch.testing.assert_close(found.float(), expected, rtol=0.05 if bf16 else 0, atol=0.2 if bf16 else 0)
    found.float().sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


def test_a_registered_step_allocates_in_the_pool_and_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, registered = list[str](), list[Any]()

    @contextmanager
    def use_mem_pool(pool: Any) -> Any:
        inside.append(pool)
        yield
        inside.pop()

    def progress(_: Any, batches: Any) -> Any:
        assert inside == ["pool of NCCL's memory"]
        assert not torch._C._is_multithreading_enabled()  # pyright: ignore[reportAttributeAccessIssue]
        return next(batches)

    backend = SimpleNamespace(mem_allocator="NCCL's memory", register_mem_pool=registered.append)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda _: backend))
    monkeypatch.setattr(torchrec_variants, "dist", SimpleNamespace(group=group))
    monkeypatch.setattr(TrainPipelineSparseDist, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(TrainPipelineSparseDist, "progress", progress)
    pipeline = torchrec_variants.RegisteredPipeline(None, None, CPU)
    assert registered == ["pool of NCCL's memory"]
    assert pipeline.progress(iter("ab")) == "a"
    assert not inside


def test_compiling_the_whole_model_changes_how_no_later_contender_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def progress(*_: Any) -> dict[str, bool]:
        found = {key: getattr(dynamo, key) for key in before}
        for key in before:
            setattr(dynamo, key, not before[key])
        return found

    before = {key: getattr(dynamo, key) for key in torchrec_variants._DYNAMO_KEYS}
    monkeypatch.setattr(TrainPipelinePT2, "progress", progress)
    pipeline = torchrec_variants.CompiledPipeline(torch.nn.Module(), None, CPU)  # type: ignore[arg-type]
    assert pipeline.progress(iter(())) == before
    assert {key: getattr(dynamo, key) for key in before} == before
    assert pipeline.progress(iter(())) == {key: not value for key, value in before.items()}, "its own steps keep them"


def _config(folder: Path, *options: str) -> Config:
    options = "--train.batch_size", "64", "--train.steps", "4", "--model.arch", "dcn", "--train.lr", "0.002", *options
    return quickstart(folder, "run", *options)


def _build(config: Config, name: str, **keys: Any) -> Trainer:
    eager = {"train.compile_dense": False, **keys}
    return step.build(ranks_here(config), name, with_keys(config, {**STEP_CONTENDERS[name], **eager}))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("world_of_one")
def test_the_bf16_hook_is_of_a_static_graph_as_every_other_contender(tmp_path: Path) -> None:
    trainer = _build(_config(tmp_path), "torchrec_strongest_bf16_gradients", **{"train.graph_dense": False})
    wrapped = [each for each in trainer.model.modules() if isinstance(each, DistributedDataParallel)]
    assert wrapped
    assert all(each.static_graph for each in wrapped)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_our_dense_part_trains_as_torchrecs(tmp_path: Path, precision: str) -> None:
    config = _config(tmp_path, "--train.precision", precision)
    losses = {}
    for name in ("torchrec", "torchrec_our_dense"):
        trainer = _build(config, name)
        run = TrainingRun(name, trainer, read_batches(trainer, 3))
        losses[name] = run.losses(6)
        task: Any = trainer.model.module
        storages = {each.untyped_storage().data_ptr() for each in task.dlrm.head.parameters()}
        trainer.close()
    assert len(storages) == 1, "views of one flat tensor"
    assert losses["torchrec"][0] - losses["torchrec"][-1] > 1e-3, "it learns"
    torch.testing.assert_close(
        torch.tensor(losses["torchrec_our_dense"]), torch.tensor(losses["torchrec"]), rtol=1e-5, atol=0
    )
