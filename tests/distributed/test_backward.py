"""Weights and optimizer states after twenty steps under each backward, against stock TorchRec's.

Bags name a row twice, ranks name each other's rows, every bag of a feature names one, and some bags are empty.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.data.batch import Batch
from dlrm_overlap.embedding import layout as layouts
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from tests.agreement import WEIGHT_TOLERANCE, assert_all_near
from tests.distributed.models import MEAN, SUM, Model, Tables, make_plan, train
from tests.distributed.workers import run_ranks

STEPS = 20
TABLES: Tables = {
    "narrow": (30, 4, ["few"], SUM),
    "two_features": (40, 64, ["hot", "many"], SUM),
    "mean": (20, 20, ["many"], MEAN),
    "wide": (10, 1024, ["few"], SUM),
    "cut": (25, 96, ["hot"], MEAN),
}
OTHER_TABLES: Tables = {"other": (15, 12, ["many"], SUM)}
SHARDS = {
    2: {"narrow": [0], "two_features": [0], "mean": [0], "wide": [1], "cut": [1, 0]},
    4: {"narrow": [2], "two_features": [0, 0], "mean": [2], "wide": [1, 2], "cut": [3, 0, 1, 2]},
}
OTHER_SHARDS = {"other": [1]}  # the other ranks have no table of that module
ROWS = 10  # that ids name, of every table
MOST_IDS = {"few": 2, "hot": 3, "many": 9}  # of a bag
BATCH_SIZES = (0, 4, 9)  # each rank begins at another: uneven, and the windows grow

OPTIMIZERS = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 2.0},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05, "eps": 1e-3},
    "rowwise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-3},
}


@dataclass(frozen=True)
class Case:
    """A run and how it exchanges."""

    optimizer: str
    backend: str
    wire_dtype: str = "fp32"
    part_bytes: int = layouts._PART_BYTES


FEW_BYTES = 256
CASES = {
    "sgd": Case("sgd", "fused"),
    "adagrad": Case("adagrad", "pgas"),
    "rowwise_adagrad": Case("rowwise_adagrad", "fused"),
    "bf16_wire": Case("sgd", "pgas", wire_dtype="bf16"),
    "rowwise_adagrad_bf16_wire": Case("rowwise_adagrad", "fused", wire_dtype="bf16"),
    "collective": Case("rowwise_adagrad", "nccl"),
    "rowwise_adagrad_again": Case("rowwise_adagrad", "fused"),
    "rowwise_adagrad_in_parts": Case("rowwise_adagrad", "fused", part_bytes=FEW_BYTES),
}


def _batches() -> Iterator[Batch]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        samples = BATCH_SIZES[(step + rank) % len(BATCH_SIZES)]
        bags = []
        for feature, most in MOST_IDS.items():
            for length in torch.randint(0, most + 1, (samples,), generator=generator).tolist():
                bag = torch.randint(0, ROWS, (length,), generator=generator)
                bags.append(torch.cat((torch.zeros(2, dtype=torch.int64), bag)) if feature == "hot" else bag)
        lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
        ids = torch.cat([*bags, torch.empty(0, dtype=torch.int64)])
        sparse = KeyedJaggedTensor(list(MOST_IDS), ids, lengths=lengths)
        yield Batch(torch.rand(samples, 1, generator=generator), sparse, torch.empty(0))


def _train(sharder: ModuleSharder) -> dict[str, Any]:
    model = Model(TABLES, OTHER_TABLES)
    plan = make_plan(model, SHARDS[dist.get_world_size()], OTHER_SHARDS, sharder)
    return train(model, plan, sharder, list(_batches()))


def _train_stock(optimizer: str, wire_dtype: str) -> dict[str, Any]:
    wire = CommType(wire_dtype)
    codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=wire, backward_precision=wire))
    return _train(EmbeddingBagCollectionSharder(dict(OPTIMIZERS[optimizer]), codecs if wire_dtype != "fp32" else None))


def _train_ours(case: Case) -> dict[str, Any]:
    options: Any = {"backend": case.backend, "wire_dtype": case.wire_dtype, "slice_bags": 4}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "_PART_BYTES", case.part_bytes)
        return _train(OverlapEmbeddingBagCollectionSharder(dict(OPTIMIZERS[case.optimizer]), **options))


def _train_all(folder: Path, *names: str) -> None:
    stock: dict[tuple[str, str], dict[str, Any]] = {}
    for name in names:
        case = CASES[name]
        key = case.optimizer, case.wire_dtype
        stock[key] = stock.get(key) or _train_stock(*key)
        torch.save({"stock": stock[key], "ours": _train_ours(case)}, folder / f"{name}_{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backward")
    run_ranks(_train_all, 2, folder, *CASES)
    return folder


def _load(folder: Path, name: str, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    saved = torch.load(folder / f"{name}_{rank}.pt")
    return saved["ours"], saved["stock"]


def _assert_agrees(folder: Path, name: str, world_size: int) -> None:
    case = CASES[name]
    exact = case.backend == "nccl"
    tolerance = 0.0 if exact else WEIGHT_TOLERANCE["fp32" if case.wire_dtype == "fp32" else "bf16_wire"]
    for rank in range(world_size):
        ours, stock = _load(folder, name, rank)
        assert_all_near(ours["outputs"][0], stock["outputs"][0], 0.0, f"rank {rank}, first output")
        assert_all_near(ours["weights"], stock["weights"], tolerance, f"rank {rank}, weight")
        assert_all_near(ours["states"], stock["states"], tolerance, f"rank {rank}, state")
        assert len(ours["states"]) == (0 if case.optimizer == "sgd" else len(stock["weights"]) - 1), "but the dense one"


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_agree(two_ranks: Path, name: str) -> None:
    _assert_agrees(two_ranks, name, 2)


@pytest.mark.slow
def test_four_ranks_agree(tmp_path: Path) -> None:
    names = "sgd", "rowwise_adagrad"
    run_ranks(_train_all, 4, tmp_path, *names)
    for name in names:
        _assert_agrees(tmp_path, name, 4)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("rowwise_adagrad_again", "rowwise_adagrad"),
        ("rowwise_adagrad_in_parts", "rowwise_adagrad"),
    ],
)
def test_not_a_bit_changes(two_ranks: Path, name: str, other: str) -> None:
    for rank in range(2):
        (ours, _), (expected, _) = _load(two_ranks, name, rank), _load(two_ranks, other, rank)
        for key in ("weights", "states"):
            assert_all_near(ours[key], expected[key], 0.0, f"rank {rank}, {key}")


def test_each_goes_its_own_way(two_ranks: Path) -> None:
    for name, case in CASES.items():
        for backend, backward, parts in _load(two_ranks, name, 0)[0]["exchanged"]:
            assert (backend, backward) == (case.backend, "CpuPush" if parts else "CollectiveBackward"), name
            assert (parts > 0) == (case.backend != "nccl"), name
            assert (parts > 2) == (case.part_bytes == FEW_BYTES), name  # more than rank 1 has tables
