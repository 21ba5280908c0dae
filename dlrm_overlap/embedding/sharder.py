"""The sharder a backend gives to `DistributedModelParallel`."""

from typing import Any

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry

from dlrm_overlap.config import EmbeddingConfig

_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


def build_sharder(config: EmbeddingConfig) -> EmbeddingBagCollectionSharder:
    """Return TorchRec's sharder with the table optimizer fused into FBGEMM's backward.

    Ids were checked where they were read; the kernel's own check stays on and stops the run, since FBGEMM's default
    would map a bad id to row 0 and go on.
    """
    fused_params: dict[str, Any] = {
        "optimizer": _OPTIMIZERS[config.optimizer],
        "learning_rate": config.lr,
        "eps": config.eps,
        "bounds_check_mode": BoundsCheckMode.FATAL,
    }
    codecs = None
    if config.wire_dtype != "fp32":
        wire = CommType(config.wire_dtype)
        codecs = get_qcomm_codecs_registry(QCommsConfig(forward_precision=wire, backward_precision=wire))
    return EmbeddingBagCollectionSharder(fused_params=fused_params, qcomm_codecs_registry=codecs)
