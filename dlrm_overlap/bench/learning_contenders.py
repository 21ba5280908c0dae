"""The contenders of `bench learning`: keys that must not change what a model learns. Does not import torch."""

from collections.abc import Mapping
from typing import Any

_BF16 = {"train.precision": "bf16"}
_TORCHREC = {"embedding.backend": "torchrec", "train.pipeline": "torchrec"}
_PGAS, _FUSED = {"embedding.backend": "pgas"}, {"embedding.backend": "fused"}

LEARNING_CONTENDERS: Mapping[str, Mapping[str, Any]] = {
    "torchrec": _TORCHREC,  # as users run it
    "torchrec_bf16": _TORCHREC | _BF16,
    "pgas": _PGAS,
    "fused": _FUSED,
    "pgas_bf16": _PGAS | _BF16,
    "fused_bf16": _FUSED | _BF16,
    "pgas_bf16_fp32_wire": _PGAS | _BF16 | {"embedding.wire_dtype": "fp32"},
    "pgas_cached": _PGAS | {"embedding.memory": "cached"},
    "pgas_any_id": _PGAS | {"data.tables.ids": "any"},
}
LEARNING_USUAL = ("torchrec", "pgas", "fused")
"""the default of `bench learning`"""
