"""The private API of TorchRec and FBGEMM that this project uses. No other package imports private API.

The public API is what TorchRec's documentation shows to users; every package imports it from TorchRec:

- the modules `torchrec.datasets`, `models`, `modules`, `optim`, `streamable` and `sparse.jagged_tensor`;
- of `torchrec.distributed` the modules `fbgemm_qcomm_codec`, `model_parallel`, `planner`, `sharding_plan`,
  `train_pipeline` and `types`, the two sharders, and `EmbeddingComputeKernel`;
- `fbgemm_gpu.split_embedding_configs`.

Everything else is private, and so is an attribute whose name begins with an underscore.

attributes   reads and writes private attributes of TorchRec's objects
fbgemm       FBGEMM's fused lookups and the operator of their backward
check        what is used beyond the names below, and whether the installed releases have it
"""

try:
    from fbgemm_gpu.quantize_comm import QuantizedCommCodec
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        CounterBasedRegularizationDefinition,
        SplitTableBatchedEmbeddingBagsCodegen,
        WeightDecayMode,
    )
    from torchrec.distributed.batched_embedding_kernel import (
        BatchedFusedEmbeddingBag,
        EmbeddingFusedOptimizer,
    )
    from torchrec.distributed.comm_ops import get_gradient_division
    from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
    from torchrec.distributed.embedding import EmbeddingCollectionContext, ShardedEmbeddingCollection
    from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
    from torchrec.distributed.embedding_sharding import (
        EmbeddingShardingContext,
        EmbeddingShardingInfo,
        FusedKJTListSplitsAwaitable,
        KJTListSplitsAwaitable,
        KJTSplitsAllToAllMeta,
    )
    from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, KJTList
    from torchrec.distributed.embeddingbag import (
        EmbeddingBagCollectionAwaitable,
        EmbeddingBagCollectionContext,
        ShardedEmbeddingBagCollection,
    )
    from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
    from torchrec.distributed.mc_embedding import (
        ManagedCollisionEmbeddingCollectionSharder,
        ShardedManagedCollisionEmbeddingCollection,
    )
    from torchrec.distributed.mc_embeddingbag import (
        ManagedCollisionEmbeddingBagCollectionSharder,
        ShardedManagedCollisionEmbeddingBagCollection,
    )
    from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder, ShardedManagedCollisionCollection
    from torchrec.distributed.sharding.cw_sequence_sharding import CwSequenceEmbeddingSharding
    from torchrec.distributed.sharding.cw_sharding import CwPooledEmbeddingSharding
    from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
    from torchrec.distributed.sharding.dp_sharding import DpPooledEmbeddingSharding
    from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingSharding
    from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
    from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
    from torchrec.distributed.sharding.tw_sequence_sharding import TwSequenceEmbeddingSharding
    from torchrec.distributed.sharding.tw_sharding import TwPooledEmbeddingSharding
    from torchrec.distributed.sharding.twcw_sharding import TwCwPooledEmbeddingSharding
    from torchrec.distributed.sharding.twrw_sharding import TwRwPooledEmbeddingSharding
    from torchrec.sparse.tensor_dict import maybe_td_to_kjt
except ImportError as error:
    from dlrm_overlap.launching.supported_versions import check_stack
    from dlrm_overlap.torchrec_private.check import find_changes, refusal

    check_stack()  # raises if a package is missing, or does not match torch
    if changes := find_changes():
        raise refusal(changes) from error
    raise
