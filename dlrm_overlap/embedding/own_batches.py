"""Features with batches of their own, TorchRec's variable batch: a feature has a bag once that several samples share.

Such ids come with inverse indices [F, B]: which of feature f's bags is that of sample s. Exchanges take a bag of each
sample, so the ids of shared bags are repeated.

Example: 3 samples; f has the bags [5], [7], the samples' are number 0, 1, 0. They become [5] [7] [5].
"""

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_overlap.config import InputError


def with_bags_of_samples(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a rank's ids with each sample's own bags; they are the same if they have no batches of their own.

    Raises:
        InputError: if they have, without inverse indices.
    """
    if not features.variable_stride_per_key():
        return features
    if (inverse := features.inverse_indices_or_none()) is None:
        raise InputError(
            "ids: features have batches of their own, but the KeyedJaggedTensor has no inverse_indices; give it those "
            "of every sample"
        )
    keys, (names, bags) = features.keys(), inverse
    sizes = torch.tensor(features.stride_per_key(), device="cpu")
    first = (sizes.cumsum(0) - sizes).to(bags.device, non_blocking=True)
    order = (bags[[names.index(key) for key in keys]] + first[:, None]).flatten().int()
    tensors = features.lengths(), features.values(), features.weights_or_none()
    lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(order, *tensors)
    return KeyedJaggedTensor(keys, values, weights, lengths=lengths, stride=bags.shape[1])
