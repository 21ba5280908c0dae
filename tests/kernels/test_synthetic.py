from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data.synthetic import Synthetic
from dlrm_overlap.data.synthetic_device import DeviceSynthetic
from dlrm_overlap.kernels import synthetic as kernels
from dlrm_overlap.kernels.compiled import CompiledKernel, specialised
from tests.agreement import assert_same_samples
from tests.kernels.emulation import CPU, interpreted

pytestmark = interpreted

FIXED = DataConfig(tables=TablesConfig(rows=[50, 3, 40_000_000, 1], multi_hot=[2, 5, 1, 1], zipf_alpha=[1.05, 0, 1, 2]))
_HOT, _ALPHA = ["0..6", "2..3", 2, "1..1"], [2, 1.05, 1, 5]
_TABLES = TablesConfig(rows=[50, 2**31 - 1, 1, 700], multi_hot=_HOT, zipf_alpha=_ALPHA, half_life=[2, 0, 0, 1])
RANGES = DataConfig(tables=_TABLES, dense_features=2)
NO_SIGNALS = DataConfig(tables=TablesConfig(count=2, rows=1), dense_features=1)
_OF_ANY = TablesConfig(rows=[50, 2**31 - 1, 1, 700], multi_hot=_HOT, ids=["any", "any", "rows", "any"])
ANY = DataConfig(tables=_OF_ANY, dense_features=2)
DRIFTING = DataConfig(tables=replace(_OF_ANY, drift=2**31 - 1, half_life=[2, 0, 0, 1]), dense_features=2)
FIXED_DRIFTING = DataConfig(tables=TablesConfig(rows=[50, 3], multi_hot=2, ids=["any", "rows"], drift=9))
_HASHED = replace(_OF_ANY, ids=["hashed", "any", "rows", "hashed"], hashed_rows=[9, 1, 1, 2**31 - 1], drift=9)
HASHED = DataConfig(tables=_HASHED, dense_features=2)
_ALL_HASHED = TablesConfig(rows=[50, 3, 9], multi_hot=2, ids="hashed", hashed_rows=[2, 1, 1000], drift=9)
ALL_HASHED = DataConfig(tables=_ALL_HASHED)
FEW_DENSE = DataConfig(tables=TablesConfig(rows=[7, 1, 900, 7], zipf_alpha=0.3), dense_features=1, seed=2**31 - 1)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize(
    "config",
    [FIXED, RANGES, NO_SIGNALS, FEW_DENSE, ANY, DRIFTING, FIXED_DRIFTING, HASHED, ALL_HASHED],
    ids=["fixed", "ranges", "one_row", "few", "any", "drifting", "fixed_drifting", "hashed", "all_hashed"],
)
def test_samples_are_those_of_numpy_bit_for_bit(config: DataConfig, split: Literal["train", "eval"]) -> None:
    expected = Synthetic(config, split)
    made = DeviceSynthetic(config, split, CPU)
    for first, count in ((0, 33), (10**12 + 7, 5)):  # more samples than a program has, and counters beyond 32 bits
        assert_same_samples(made.read(first, count), expected.read(first, count))


def test_a_batch_may_have_no_id_at_all() -> None:
    config = DataConfig(tables=TablesConfig(rows=[9], multi_hot="0..1"), dense_features=1)
    expected, made = Synthetic(config, "train"), DeviceSynthetic(config, "train", CPU)
    empty = next(i for i in range(100) if expected.read(i, 1).sparse.values().numel() == 0)
    assert_same_samples(made.read(empty, 1), expected.read(empty, 1))


def test_equal_tables_share_their_cells() -> None:
    config = DataConfig(tables=TablesConfig(count=50, rows=1000))
    source = DeviceSynthetic(config, "train", CPU)._source
    assert len(source.cells) == 256 * kernels.CELL_WORDS.value  # 128 ranks, and 16 stretches an octave up to 1000
    assert len(set(source.tables[:, kernels.OFFSET.value].tolist())) > 40


def test_kernels_fuse_no_product_with_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fused one rounds once where numpy rounds twice. The interpreter fuses nothing, so check the option."""
    made: list[CompiledKernel] = []

    def recorded(kernel: Any, **options: Any) -> CompiledKernel:
        made.append(specialised(kernel, **options))
        return made[-1]

    monkeypatch.setattr(kernels, "specialised", recorded)
    DeviceSynthetic(FIXED, "train", CPU).read(0, 3)
    fused = {each.name: each._options.get("enable_fp_fusion", True) for each in made}
    assert fused == {"_draw_features": True, "_draw_ids": False, "_draw_labels": False}


def test_a_dense_feature_is_drawn_from_numpys_philox_stream() -> None:
    made = DeviceSynthetic(FEW_DENSE, "train", CPU)
    sample = 3
    raw = np.random.Philox(key=made._key, counter=sample * made._blocks_per_sample).random_raw(2)
    fields = sum((int(raw[1]) >> bits) & 0xFFFF for bits in (0, 16, 32, 48)) - 2 * 65535
    assert made.read(sample, 1).dense.item() == pytest.approx(fields * (3 / (2**32 - 1)) ** 0.5, rel=1e-6)
