"""TorchRec's MPZCH module, imported without the warning that its file raises about its own code."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)
    from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

__all__ = ["HashZchEvictionConfig", "HashZchEvictionPolicyName", "HashZchManagedCollisionModule"]
