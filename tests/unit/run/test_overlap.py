"""What `train.overlap` stands for in a run."""

from typing import Any

import pytest
from torch import nn

from dlrm_overlap import overlap
from dlrm_overlap.comm.choose import Choice, Computation
from dlrm_overlap.config import Config, DataConfig, EmbeddingConfig, ModelConfig, TablesConfig, TrainConfig
from dlrm_overlap.model import DLRM, build_model
from dlrm_overlap.overlap import Overlap, beside, resolve_overlap

MODEL = ModelConfig(dim=128, bottom_mlp=[256, 128], top_mlp=[512, 1])
SAMPLES = 8192  # whose gradient of a table has 2 MB in bf16, 4 MB in fp32


@pytest.fixture(scope="module")
def dlrm() -> DLRM:
    return build_model(MODEL, EmbeddingConfig(), [10] * 26, 13, 0)


def _config(backend: str = "pgas", backward: str = "auto", **train: Any) -> Config:
    embedding = EmbeddingConfig(backend=backend, backward=backward)
    data = DataConfig(tables=TablesConfig(count=26, rows=10))
    return Config(model=MODEL, data=data, embedding=embedding, train=TrainConfig(steps=1, precision="bf16", **train))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (_config(overlap="stores"), Overlap("push")),
        (_config(overlap="dma"), Overlap("dma")),
        (_config(overlap="partition"), Overlap("push", partitioned=True)),
        (_config(overlap="dma", backward="collective"), Overlap("collective")),
        (_config("torchrec", overlap="dma"), Overlap("auto")),
        (_config("nccl"), Overlap("auto")),
        (_config(pipeline="torchrec"), Overlap("auto")),
        (_config(capture=False), Overlap("auto")),
    ],
)
def test_what_is_told_by_name_and_what_is_not_captured(dlrm: DLRM, config: Config, expected: Overlap) -> None:
    assert resolve_overlap(config, dlrm, SAMPLES, 4, "cuda") == expected


def test_ranks_that_have_no_peer_or_no_gpu_are_left_as_they_are(dlrm: DLRM) -> None:
    assert resolve_overlap(_config(), dlrm, SAMPLES, 4, "cpu") == Overlap("auto")
    assert resolve_overlap(_config(), dlrm, SAMPLES, 1, "cuda") == Overlap("auto")


@pytest.mark.parametrize(("chosen", "backward"), [("dma", "dma"), ("dma_aside", "dma"), ("stores", "push")])
def test_auto_takes_what_is_chosen_by_sizes(
    dlrm: DLRM, chosen: str, backward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def choose(computation: Any, communication: Any, world_size: int, table: Any, available: set[str]) -> Choice:
        asked.append((computation, communication, world_size))
        assert chosen in available
        return Choice(chosen, None, 1.5)

    monkeypatch.setattr(overlap, "choose", choose)
    found = resolve_overlap(_config(), dlrm, SAMPLES, 4, "cuda")
    assert found.backward == backward
    assert found.reason.endswith("are predicted to take 1.500 ms so")
    ((computation, communication, world_size),) = asked
    assert computation == beside(dlrm, SAMPLES)
    assert (communication.kind, communication.bytes, world_size) == ("all_to_all", SAMPLES * 26 * 128 * 2, 4)


def test_tables_of_small_batches_are_stored_and_the_packages_table_knows_the_others(dlrm: DLRM) -> None:
    small = resolve_overlap(_config(), dlrm, 2048, 4, "cuda")
    assert (small.backward, "too few for a copy" in small.reason) == ("push", True)
    large = resolve_overlap(_config(), dlrm, SAMPLES, 4, "cuda")
    assert large.backward in ("push", "dma")
    assert "55 MB beside products of" in large.reason


def test_the_products_beside_the_gradients_are_the_heads_weights_and_the_bottom_mlps_both() -> None:
    model = nn.Module()
    model.head, model.bottom = nn.Linear(8, 1), nn.Linear(4, 8)
    expected = Computation("gemm", 2.0 * 100 * (8 + 2 * 32), 2.0 * (100 * 9 + 8 + 2 * (100 * 12 + 32)), calls=3)
    assert beside(model, 100) == expected  # type: ignore[arg-type]
