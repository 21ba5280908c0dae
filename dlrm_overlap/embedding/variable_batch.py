"""Variable batches (TorchRec's VBE): a feature lists a bag once that several samples share.

Such ids come with inverse indices [F, B], the bag of feature f that is sample s's. Exchanges need the same number of
bags for each feature, so empty bags are added, and received pooled embeddings are gathered by the inverse indices.

Example: 3 samples; f has the bags [5], [7] with inverse indices 0, 1, 0; g has [1] [2] [3]. The bags of f become [5]
[7] [], and from its pooled embeddings, rows 5, 7 and 0, the samples get 5, 7, 5.
"""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from dlrm_overlap.config import InputError

InverseIndices = tuple[list[str], torch.Tensor]
"""names of F features, and [F, B] int64: the bag of each sample"""


class _PaddedFeatures(list[str]):
    """The names in the inverse indices of ids that `with_even_batches` has padded; copies of the ids keep this list."""


def with_even_batches(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids padded to one bag for each sample and feature; unchanged unless the batch is variable."""
    features = _with_one_stride(features)
    if not features.variable_stride_per_key():
        return features
    inverse = _inverse_of(features)
    sizes, lengths = torch.tensor(features.stride_per_key(), device="cpu"), features.lengths()
    samples = max(int(sizes.max()), inverse[1].shape[1])
    first = torch.arange(len(sizes), device="cpu") * samples - (sizes.cumsum(0) - sizes)
    bags = torch.arange(len(lengths), device="cpu") + first.repeat_interleave(sizes)
    even = lengths.new_zeros(len(sizes) * samples).index_copy_(0, bags.to(lengths.device, non_blocking=True), lengths)
    tensors, padded = (features.values(), features.weights_or_none()), (_PaddedFeatures(inverse[0]), inverse[1])
    return KeyedJaggedTensor(features.keys(), *tensors, lengths=even, stride=samples, inverse_indices=padded)


def gathering(features: KeyedJaggedTensor) -> InverseIndices | None:
    """Return the inverse indices by which pooled embeddings are gathered, of ids that were padded; else None.

    As in TorchRec, inverse indices of a batch that is not variable are for the model alone.
    """
    inverse = features.inverse_indices_or_none()
    return inverse if inverse is not None and isinstance(inverse[0], _PaddedFeatures) else None


def of_samples(pooled: KeyedTensor, inverse: InverseIndices) -> KeyedTensor:
    """Gather the samples' pooled embeddings [B, D_total] from the pooled embeddings of bags."""
    keys, (features, bags) = pooled.keys(), inverse
    numbers = {feature: number for number, feature in enumerate(features)}
    # If several tables pool a feature, a name is the feature's, "@", and the table's.
    rows = [bags[numbers[key if key in numbers else key.rpartition("@")[0]]] for key in keys]
    columns = pooled.values().split(pooled.length_per_key(), dim=1)
    values = torch.cat([column.index_select(0, row) for column, row in zip(columns, rows, strict=True)], dim=1)
    return KeyedTensor(keys, pooled.length_per_key(), values)


def with_bags_of_samples(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids with each sample's own bags, repeating shared ones; unchanged unless the batch is variable."""
    features = _with_one_stride(features)
    if not features.variable_stride_per_key():
        return features
    keys, (names, bags) = features.keys(), _inverse_of(features)
    sizes = torch.tensor(features.stride_per_key(), device="cpu")
    first = (sizes.cumsum(0) - sizes).to(bags.device, non_blocking=True)
    order = (bags[[names.index(key) for key in keys]] + first[:, None]).flatten().int()
    tensors = features.lengths(), features.values(), features.weights_or_none()
    lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(order, *tensors)
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=bags.shape[1])


def _with_one_stride(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the batch with one stride if its features have strides of their own, all equal.

    `KeyedJaggedTensor.from_jt_dict(force_variable_stride=True)` makes such batches. Without inverse indices, each
    sample has its own bag.
    """
    if not features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return features
    samples, *others = {*features.stride_per_key()} or {0}
    if others:
        return features
    tensors = features.values(), features.weights_or_none()
    return KeyedJaggedTensor(features.keys(), *tensors, lengths=features.lengths(), stride=samples)


def _inverse_of(features: KeyedJaggedTensor) -> InverseIndices:
    if (inverse := features.inverse_indices_or_none()) is None:
        raise InputError(
            "ids: a variable batch without inverse_indices; give the KeyedJaggedTensor the bag of every sample"
        )
    return inverse
