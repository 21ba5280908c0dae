"""The interaction of DLRM by dot products. Imports only PyTorch."""

import torch
from torch import nn


class DotInteraction(nn.Module):
    """The bottom MLP's output d, then the dot products of all pairs among d and T pooled embeddings.

    Source: Naumov et al., arXiv 1906.00091, section 2.1. Example: T = 2 gives d, d.e0, d.e1, e0.e1 for each sample.
    """

    def __init__(self, features: int, dim: int) -> None:
        super().__init__()
        self.features, self.dim = features, dim
        self.out_features = dim + features * (features - 1) // 2
        rows, columns = torch.triu_indices(features, features, offset=1)
        self.pairs: torch.Tensor
        self.register_buffer("pairs", rows * features + columns, persistent=False)

    def forward(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Map [b, (T + 1) * D], d first, to [b, D + (T + 1) * T / 2]."""
        each = embeddings.view(-1, self.features, self.dim)
        products = torch.bmm(each, each.transpose(1, 2)).flatten(1)
        # The backward of one flat index is a scatter; a pair of indices would be sorted.
        return torch.cat((embeddings[:, : self.dim], products.index_select(1, self.pairs)), dim=1)
