"""Shards of layouts that are worked by hand."""

from typing import Any

import torch

from dlrm_overlap.embedding.layout import FeatureShard


def make_shard(name: str, owner: int, dim: int, **where: Any) -> FeatureShard:
    """Return a shard of float32 rows, at the first of every place but for those named."""
    where = {"input": 0, "feature": 0, "lookup": 0, "table": 0, "first_column": 0} | where
    return FeatureShard(name, owner, dim=dim, mean=False, dtype=torch.float32, feature_name=name, **where)
