"""Steps with a history, whose rows are not pooled: bytes by distinct ids, and passes over memory, as counted."""

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.cli import main
from dlrm_overlap.config import SequenceConfig
from dlrm_overlap.data.synthetic import Synthetic
from dlrm_overlap.embedding.distinct import DistinctIds, NamedSequence, SlotBlocks
from dlrm_overlap.simulate import step
from dlrm_overlap.train.attention import TargetAttention
from tests.conftest import configuration


def test_bytes_go_with_the_distinct_ids_of_the_data(tmp_path: Path) -> None:
    config, rows = configuration("--config", "configs/sequence.yaml"), tmp_path / "rows.csv"
    options = ["--train", "configs/sequence.yaml", "--network.gpus_per_host", "2", "--output", str(rows)]
    assert main(["simulate", *options, "--vary", "work.dedup=true,false"]) == 0
    with rows.open(newline="") as file:
        found = [(row["backend"], int(row["link_bytes"]), float(row["ms"])) for row in csv.DictReader(file)]
    assert [backend for backend, *_ in found] == ["torchrec", "pgas"] * 2
    batch = Synthetic(config.data, "train").read(0, 512).sparse.to_dict()["t_02"].values()
    for ids, (_, link_bytes, _) in ((len(batch.unique()), found[1]), (len(batch), found[3])):
        assert link_bytes == pytest.approx((512 * 2 + ids) * 16 * 4 / 2, rel=0.05), "half of all rows, in fp32"
    assert found[1][1] < found[3][1] / 4
    assert main(["simulate", "--train", "configs/bench/step_sequence.yaml", "--work.plan", "torchrec"]) == 0


class _Passes(TorchDispatchMode):
    """Counts operators, and the bytes of the tensors that each reads or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in func.name():
            tensors = {id(each): each for each in tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)}
            self.operators, self.bytes = self.operators + 1, self.bytes + sum(each.nbytes for each in tensors.values())
        return result


def _find(ids: int) -> list[_Passes]:
    features: Any = KeyedJaggedTensor(["f"], torch.arange(ids).int() % 90, lengths=torch.tensor([ids]).int())
    features.capacities = [ids]
    finder = DistinctIds([NamedSequence("f", "f", 0)], [100], torch.device("cpu"))
    finder.place(finder.sort(features, [ids]), SlotBlocks(90, (1,)))  # which makes what later batches find
    with _Passes() as passes:
        finder.place(finder.sort(features, [ids]), SlotBlocks(90, (1,)))
    return [passes]


def _attend(positions: int, dtype: torch.dtype = torch.float32) -> list[_Passes]:
    attention = TargetAttention(SequenceConfig(history=1, positions=positions - 1, heads=4), 512)
    rows, candidates = (torch.randn(n, 512).to(dtype).requires_grad_() for n in (8 * positions, 8))
    with torch.autocast("cpu", torch.bfloat16), _Passes() as forward:
        attended = attention(candidates, rows, torch.full((8,), positions)).float().sum()
    with _Passes() as backward:
        attended.backward()
    return [forward, backward]


@pytest.mark.parametrize(
    ("work", "sizes", "elements", "taken", "hidden"),
    [
        # A sort reads and writes keys of 4 bytes and numbers of 8 four times, of which a count sees one, and the keys
        # are read for its histogram.
        (_find, (1 << 14, 1 << 15), 1, [step._FIND], 16 * -1 + 4 * 24 + 4),
        (_attend, (128, 256), 8 * 512, step._ATTEND["float32"], 0),
        (partial(_attend, dtype=torch.bfloat16), (128, 256), 8 * 512, step._ATTEND["bfloat16"], 0),
    ],
    ids=["distinct ids", "attention", "attention to bf16"],
)
def test_passes_over_memory_are_those_of_the_operators(
    work: Any, sizes: tuple[int, int], elements: int, taken: list[tuple[int, int]], hidden: int
) -> None:
    less, more = (work(size) for size in sizes)
    for few, many, (operators, nbytes) in zip(less, more, taken, strict=True):
        counted = (many.bytes - few.bytes) / (sizes[1] - sizes[0]) / elements
        assert counted + hidden == pytest.approx(nbytes, rel=0.05)
        assert many.operators == pytest.approx(operators, abs=2)
