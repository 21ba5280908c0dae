"""TorchRec's codecs of quantised communication, in whose place an exchange sends a wire type."""

from collections.abc import Mapping, Sequence
from typing import Any

from fbgemm_gpu.quantize_comm import QuantizedCommCodec
from torchrec.distributed.types import CommOp, NoOpQuantizedCommCodec, QuantizedCommCodecs

_UNPOOLED = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
_POOLED = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER


def precisions(registry: Mapping[str, QuantizedCommCodecs] | None, used: Sequence[CommOp] = ()) -> set[str]:
    """Return in which precisions collectives send pooled embeddings and gradients; none without codecs for any.

    Args:
        registry: the sharder's `qcomm_codecs_registry`.
        used: the collectives that are asked for; by default those that have codecs.

    Example: {"fp16"} for float16 both ways, {"fp16 forward, bf16 backward"}, {"int8"}, {"fp16 with loss scale 8.0"}.
    """
    registry = registry or {}
    kind = (_UNPOOLED,) if _UNPOOLED in used else _POOLED
    if not (known := [op for op in kind if op.name in registry]):
        return set()
    return {_precision(registry.get(op.name, QuantizedCommCodecs())) for op in used or known}


def _precision(codecs: QuantizedCommCodecs) -> str:
    forward, backward = _of_one(codecs.forward), _of_one(codecs.backward)
    return forward if forward == backward else f"{forward} forward, {backward} backward"


def _of_one(codec: Any) -> str:
    if isinstance(codec, NoOpQuantizedCommCodec):
        return "fp32"
    if type(codec) is not QuantizedCommCodec:  # a class of the user's, which may do anything
        return type(codec).__name__
    scale = codec._loss_scale
    return codec._comm_precision.value + ("" if scale is None else f" with loss scale {scale}")
