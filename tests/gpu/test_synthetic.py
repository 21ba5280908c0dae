from dataclasses import replace

import pytest
import torch

from dlrm_overlap.config import DataConfig, TablesConfig
from dlrm_overlap.data.synthetic import Synthetic
from dlrm_overlap.data.synthetic_device import DeviceSynthetic
from tests.agreement import assert_same_samples
from tests.conftest import configuration

pytestmark = pytest.mark.gpu
SAMPLES = 8192
MIXED = TablesConfig(
    rows=[50, 2**31 - 1, 1, 700],
    multi_hot=["0..6", "2..30", 2, 1],
    zipf_alpha=[2.0, 1.05, 1.0, 5.0],
    half_life=[0, 5, 0, 0],
)
SKEWED = [TablesConfig(count=3, rows=4 * 10**7, multi_hot=3, zipf_alpha=alpha) for alpha in (0.0, 1.05, 2.0)]
CASES = {
    "mlperf": configuration("--config", "configs/mlperf_dcnv2.yaml", "--data.tables.max_rows", "4000000").data,
    "ranges": DataConfig(tables=MIXED, dense_features=2, seed=2**31 - 1),
    "drifting": DataConfig(tables=replace(MIXED, ids=["any", "any", "rows", "any"], drift=2**31 - 1), dense_features=2),
    "hashed": DataConfig(
        tables=replace(MIXED, ids=["any", "hashed", "rows", "hashed"], hashed_rows=[9, 10**6, 9, 2**31 - 1], drift=5000)
    ),
    "fixed drifting": DataConfig(tables=TablesConfig(rows=[10**6, 1000], multi_hot=3, ids="any", drift=5000)),
    **{f"alpha {tables.zipf_alpha}": DataConfig(tables=tables) for tables in SKEWED},
}


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_samples_are_those_of_the_cpu_bit_for_bit(config: DataConfig) -> None:
    expected, made = Synthetic(config, "train"), DeviceSynthetic(config, "train", torch.device("cuda", 0))
    for first in (0, SAMPLES, 10**12 + 7):  # at the last one, counters have more than 32 bits
        assert_same_samples(made.read(first, SAMPLES), expected.read(first, SAMPLES))
