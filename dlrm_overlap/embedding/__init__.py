"""The embedding stage: plan, sharder, initial weights."""

from importlib.util import find_spec

if not all(map(find_spec, ("torch", "fbgemm_gpu", "torchrec"))):
    from dlrm_overlap.launching.stack import check_stack

    check_stack()  # raises, with the command that installs the missing one
