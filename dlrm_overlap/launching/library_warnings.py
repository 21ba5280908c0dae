"""Hides what TorchRec and PyTorch warn of in their own code, in a process that this project owns."""

import logging
import warnings


def hide_library_warnings() -> None:
    """Hide the libraries' warnings about their own use of deprecated names, and about options the planner ignores.

    Errors of the libraries, and warnings of other kinds, are still shown.
    """
    warnings.filterwarnings("ignore", category=FutureWarning, module="torchrec|torch|dlrm_overlap")
    warnings.filterwarnings("ignore", message="To copy construct from a tensor", module="torchrec")
    for library in ("torchrec", "torch.fx"):
        logging.getLogger(library).setLevel(logging.ERROR)
