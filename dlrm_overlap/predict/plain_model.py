"""The DLRM in plain PyTorch, from the weights of a checkpoint."""

import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional

from dlrm_overlap.config import ModelConfig
from dlrm_overlap.data.schema import table_keys
from dlrm_overlap.train.attention import TargetAttention
from dlrm_overlap.train.interaction import DotInteraction

_ACTIVATIONS = {"relu": torch.relu, "gelu": functional.gelu}
_PREFIX = "dlrm."
# The names of tables of any id have a longer prefix, such as `id_embedding._embedding_module`.
_TABLE = re.compile(r".*\b(?:embedding_bags|embeddings)\.(\w+)\.weight")
_IDS = re.compile(r".*\b_managed_collision_modules\.(\w+)\._hash_zch_identities")


def tables_in(names: Iterable[str]) -> dict[str, str]:
    """Return table -> the name of its weights, from the names in a checkpoint."""
    return {match[1]: name for name in names if (match := _TABLE.fullmatch(name))}


def ids_in(names: Iterable[str]) -> dict[str, str]:
    """Return table of any id -> the name of its rows' ids, from the names in a checkpoint."""
    return {match[1]: name for name in names if (match := _IDS.fullmatch(name))}


class PlainDLRM(nn.Module):
    """Computes what `train.model.DLRM` does, in float32."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, torch.Tensor], tables: int) -> None:
        """Take the weights by their names in a checkpoint; the tables are not copied."""
        super().__init__()
        named = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
        self._weights, self._activation = named, _ACTIVATIONS[config.activation]
        names, history = tables_in(named), config.sequence.history
        of_tables = [named[names[key]] for key in table_keys(tables)]
        self.rows = [len(table) for table in of_tables]
        """number of rows of each table"""
        self._pooled = {t: table for t, table in enumerate(of_tables) if t != history}
        self._history, self._candidate = history, config.sequence.candidate
        if history is not None:
            self._histories = of_tables[history]
            self._attention = TargetAttention(config.sequence, config.dim)
            prefix = "attention."
            own = {name.removeprefix(prefix): each for name, each in named.items() if name.startswith(prefix)}
            self._attention.load_state_dict(own)
        self._dot = DotInteraction(tables + 1, config.dim) if config.arch == "dot" else None
        self._cross_layers = config.cross_layers

    @torch.inference_mode()
    def forward(self, dense: torch.Tensor, ids: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the logits [b, L] of L labels.

        Args:
            dense: [b, F] float32.
            ids: for each table the rows of all bags [n] int64, bag after bag, and the size of each bag [b] int64.
        """
        pooled = {t: _pool(table, *ids[t]) for t, table in self._pooled.items()}
        parts = [self._layers("bottom._mlp", dense)]
        if self._history is not None:
            values, lengths = ids[self._history]
            rows = functional.embedding(values, self._histories).float()
            parts.append(self._attention(pooled[self._candidate], rows, lengths))
        embeddings = torch.cat([*parts, *pooled.values()], dim=1)
        crossed = self._crossed(embeddings) if self._dot is None else self._dot(embeddings)
        return self._linear("head.logit", self._layers("head.top._mlp", crossed))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _layers(self, name: str, x: torch.Tensor) -> torch.Tensor:
        number = 0
        while f"{name}.{number}._linear.weight" in self._weights:
            x = self._activation(self._linear(f"{name}.{number}._linear", x))
            number += 1
        return x

    def _crossed(self, x0: torch.Tensor) -> torch.Tensor:
        x = x0
        for layer in range(self._cross_layers):
            parts = (f"head.interaction.{name}.{layer}" for name in ("V_kernels", "W_kernels", "bias"))
            v, w, bias = map(self._weights.__getitem__, parts)
            x = x0 * (functional.linear(functional.linear(x, v), w) + bias) + x
        return x


def _pool(table: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of each bag [b, D] float32."""
    if table.dtype != torch.float32:  # the sum is in float32, and the table is not copied
        table, values = functional.embedding(values, table).float(), torch.arange(len(values))
    return functional.embedding_bag(values, table, lengths.cumsum(0) - lengths, mode="sum")
