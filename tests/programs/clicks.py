"""Synthetic clicks in TorchRec's batches: labels follow from ids and numbers, so that a model can learn them."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torchrec.datasets.utils import Batch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def start() -> torch.device:
    """Make the process group by torchrun's variables, unless there is one, and return this rank's device."""
    on_gpu = torch.cuda.is_available()
    if not dist.is_initialized():
        if on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def collection(rows: Mapping[str, int], dim: int) -> EmbeddingBagCollection:
    """Return a collection with a table for each feature."""
    tables = [
        EmbeddingBagConfig(name=f"t_{key}", embedding_dim=dim, num_embeddings=count, feature_names=[key])
        for key, count in rows.items()
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


def clicks(
    rows: Mapping[str, int], most_ids: int, dense: int, samples: int, steps: int, seed: int = 0
) -> Iterator[Batch]:
    """Yield this rank's batches.

    Args:
        rows: of the table of each feature.
        most_ids: bags have 0 to `most_ids` ids; if it is 1, each has one.
        dense: numbers of a sample.
        samples: of a batch.
        seed: selects a stream of batches.
    """
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        numbers = torch.rand(samples, dense, generator=generator)
        lengths, values, score = [], [], numbers.sum(dim=1) - dense / 2
        for count in rows.values():
            bags = torch.randint(int(most_ids == 1), most_ids + 1, (samples,), generator=generator)
            ids = torch.randint(0, count, (int(bags.sum()),), generator=generator)
            score.index_add_(0, torch.arange(samples).repeat_interleave(bags), (ids * 7 % 5 - 2).float())
            lengths.append(bags.int())
            values.append(ids)
        ids = KeyedJaggedTensor(list(rows), torch.cat(values), lengths=torch.cat(lengths))
        yield Batch(numbers, ids, (score > 0).float())


def train(pipeline: Any, batches: Iterator[Batch], steps: int) -> list[torch.Tensor]:
    """Return the loss of each step."""
    return [pipeline.progress(batches).clone() for _ in range(steps)]
