"""The drop-in's arguments: a value that breaks a rule is refused when the sharder is made."""

from typing import Any

import pytest

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"backend": "torchrec"}, "backend: 'torchrec' is not known; take one of nccl, pgas, fused"),
        ({"slice_bags": 3}, "slice_bags: 3 must be a power of two from 4 on"),
        ({"output_dtype": "bf16"}, "output_dtype: 'bf16', but the wire's type is fp32"),
        ({"programs_per_sm": 0}, "programs_per_sm: 0 must be a whole number from 1 on; take None"),
        ({"gradient_parts": 0}, "gradient_parts: 0 must be a whole number from 1 on; take None"),
        ({"gradient_parts": 1.5}, "gradient_parts: 1.5 must be a whole number from 1 on; take None"),
        ({"leading_columns": -4}, "leading_columns: -4 must be a whole number from 0 on; take 0"),
    ],
)
def test_a_value_that_breaks_a_rule(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError) as error:
        OverlapEmbeddingBagCollectionSharder(**arguments)
    assert told in str(error.value)
