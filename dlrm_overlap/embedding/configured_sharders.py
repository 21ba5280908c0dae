"""The sharders of a run, from its configuration."""

from collections.abc import Mapping
from typing import Any

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder, QuantizedCommCodecs

from dlrm_overlap.backends import BACKENDS
from dlrm_overlap.config import EmbeddingConfig
from dlrm_overlap.embedding.id_tables.sharder import (
    OverlapManagedCollisionEmbeddingBagCollectionSharder,
    OverlapManagedCollisionEmbeddingCollectionSharder,
)
from dlrm_overlap.embedding.sharder import (
    OverlapEmbeddingBagCollectionSharder,
    OverlapEmbeddingCollectionSharder,
    PooledArguments,
    UnpooledArguments,
)
from dlrm_overlap.torchrec_private import (
    BoundsCheckMode,
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
)
from dlrm_overlap.torchrec_private.fbgemm import OPTIMIZERS

_OPTIMIZERS = {name: optimizer for optimizer, name in OPTIMIZERS.items()}


def build_sharders(
    config: EmbeddingConfig,
    precision: str = "fp32",
    leading_columns: int = 0,
    fused_params: Mapping[str, Any] | None = None,
) -> list[ModuleSharder[Any]]:
    """Return the sharders of pooled and of unpooled tables for the configured backend, which is not `auto`.

    If the wire type is the type of the dense part (`precision`), pooled embeddings have this type, with
    `leading_columns` columns in front; otherwise they are float32 without such columns. Unpooled rows are sent as
    `config.wire_dtype`, where auto means fp32. `fused_params` override the parameters of FBGEMM's lookups, see
    `fused_params_of`.
    """
    about_tables, backend = fused_params_of(config, fused_params), BACKENDS[config.backend]
    pooled_wire = config.resolved_wire_dtype(precision)
    unpooled_wire = "fp32" if config.wire_dtype == "auto" else config.wire_dtype
    dense_dtype = "bf16" if precision == "bf16" else "fp32"
    pooled = EmbeddingBagCollectionSharder(dict(about_tables), _codecs(pooled_wire))
    of_any_id: Any = ManagedCollisionEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder(dict(about_tables), _codecs(pooled_wire))
    )
    unpooled = EmbeddingCollectionSharder(dict(about_tables), _codecs(unpooled_wire))
    unpooled_of_any_id: Any = ManagedCollisionEmbeddingCollectionSharder(
        EmbeddingCollectionSharder(dict(about_tables), _codecs(unpooled_wire))
    )
    if backend.forward is not None:
        arguments = {
            **_keys_of(config, PooledArguments, pooled_wire),
            "copy_output": False,  # our model drops it within its forward
            "output_order": "model",
            "output_dtype": dense_dtype if dense_dtype == pooled_wire else "fp32",
            "leading_columns": leading_columns if dense_dtype == pooled_wire else 0,
        }
        pooled = OverlapEmbeddingBagCollectionSharder(about_tables, **arguments)
        of_any_id = OverlapManagedCollisionEmbeddingBagCollectionSharder(dict(about_tables), **arguments)
    if backend.stores_to_peers:
        arguments = {
            **_keys_of(config, UnpooledArguments, unpooled_wire),
            "output_dtype": dense_dtype if unpooled_wire in ("fp32", dense_dtype) else "fp32",
        }
        unpooled = OverlapEmbeddingCollectionSharder(dict(about_tables), **arguments)
        unpooled_of_any_id = OverlapManagedCollisionEmbeddingCollectionSharder(dict(about_tables), **arguments)
    return [pooled, unpooled, of_any_id, unpooled_of_any_id]


def _keys_of(config: EmbeddingConfig, arguments: type, wire_dtype: str) -> dict[str, Any]:
    values = vars(config) | {"wire_dtype": wire_dtype}
    return {name: value for name, value in values.items() if name in arguments.__annotations__}


def fused_params_of(config: EmbeddingConfig, fused_params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the parameters of FBGEMM's lookups, overridden by `fused_params`.

    An id outside its table stops the run; FBGEMM's default would take row 0 instead.
    """
    return {
        "optimizer": _OPTIMIZERS[config.optimizer],
        "learning_rate": config.lr,
        "eps": config.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
        **(fused_params or {}),
    }


def _codecs(wire_dtype: str) -> dict[str, QuantizedCommCodecs] | None:
    if wire_dtype == "fp32":
        return None
    wire = CommType(wire_dtype)
    return get_qcomm_codecs_registry(QCommsConfig(forward_precision=wire, backward_precision=wire))
