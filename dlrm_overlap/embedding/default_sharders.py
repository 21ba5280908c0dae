"""TorchRec's default sharders, with ours where we have one."""

from typing import Any

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import get_default_sharders as get_torchrec_sharders
from torchrec.distributed.types import ModuleSharder

from dlrm_overlap.embedding.id_tables.sharder import (
    OverlapManagedCollisionEmbeddingBagCollectionSharder,
    OverlapManagedCollisionEmbeddingCollectionSharder,
)
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder, OverlapEmbeddingCollectionSharder
from dlrm_overlap.torchrec_private import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
)


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """Return TorchRec's default sharders, with ours for pooled and unpooled tables, also of any id."""
    ours: dict[type, Any] = {
        EmbeddingBagCollectionSharder: OverlapEmbeddingBagCollectionSharder,
        EmbeddingCollectionSharder: OverlapEmbeddingCollectionSharder,
        ManagedCollisionEmbeddingBagCollectionSharder: OverlapManagedCollisionEmbeddingBagCollectionSharder,
        ManagedCollisionEmbeddingCollectionSharder: OverlapManagedCollisionEmbeddingCollectionSharder,
    }
    return [ours[type(each)]() if type(each) in ours else each for each in get_torchrec_sharders()]
