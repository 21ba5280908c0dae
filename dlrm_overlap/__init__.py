"""DLRM training whose embedding exchange overlaps with the rest of the step.

These names are the stable interface, imported on first use; the modules that define them may move.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlrm_overlap.embedding.default_sharders import get_default_sharders
    from dlrm_overlap.embedding.fused_tables import FusedTables
    from dlrm_overlap.embedding.id_layout import BatchCapacity
    from dlrm_overlap.embedding.id_tables.sharder import (
        OverlapManagedCollisionEmbeddingBagCollectionSharder,
        OverlapManagedCollisionEmbeddingCollectionSharder,
    )
    from dlrm_overlap.embedding.plan import constraints
    from dlrm_overlap.embedding.sharder import (
        OverlapEmbeddingBagCollectionSharder,
        OverlapEmbeddingCollectionSharder,
    )
    from dlrm_overlap.predict.scorer import Scorer
    from dlrm_overlap.train.explain import explain
    from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
    from dlrm_overlap.train.profiling import profile_steps

__all__ = [
    "BatchCapacity",
    "FusedTables",
    "GraphTrainPipeline",
    "OverlapEmbeddingBagCollectionSharder",
    "OverlapEmbeddingCollectionSharder",
    "OverlapManagedCollisionEmbeddingBagCollectionSharder",
    "OverlapManagedCollisionEmbeddingCollectionSharder",
    "Scorer",
    "constraints",
    "explain",
    "get_default_sharders",
    "profile_steps",
]

_MODULES = {
    "BatchCapacity": "embedding.id_layout",
    "FusedTables": "embedding.fused_tables",
    "GraphTrainPipeline": "train.graphs.train_pipeline",
    "OverlapEmbeddingBagCollectionSharder": "embedding.sharder",
    "OverlapEmbeddingCollectionSharder": "embedding.sharder",
    "OverlapManagedCollisionEmbeddingBagCollectionSharder": "embedding.id_tables.sharder",
    "OverlapManagedCollisionEmbeddingCollectionSharder": "embedding.id_tables.sharder",
    "Scorer": "predict.scorer",
    "constraints": "embedding.plan",
    "explain": "train.explain",
    "get_default_sharders": "embedding.default_sharders",
    "profile_steps": "train.profiling",
}


_RENAMED = {"BatchBound": "BatchCapacity"}  # names of earlier versions


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        import warnings

        warnings.warn(f"dlrm_overlap.{name} is deprecated; use {_RENAMED[name]}", FutureWarning, stacklevel=2)
        name = _RENAMED[name]
    if name in _MODULES:
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("dlrm-overlap")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        import tomllib
        from pathlib import Path

        project = Path(__file__).resolve().parents[1] / "pyproject.toml"
        return tomllib.loads(project.read_text())["project"]["version"]
