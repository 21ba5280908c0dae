"""What becomes of an exchange of which one part has failed on this rank."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from dlrm_overlap.embedding.protocol.windows import WindowHeldError

Parameters = ParamSpec("Parameters")
Returned = TypeVar("Returned")


def fails_for_good(part: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Return a method that is refused once a part of a step, of the same object, has failed on this rank.

    The peers wait for the step that failed, and would take a later step's data for its own. The object keeps the first
    failure in `failure`, which is None until then. In inference mode the method runs outside of it, since training
    steps could not write to what is made in it and kept.

    Raises:
        RuntimeError: by the method, if an earlier part has failed.
    """

    @wraps(part)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Returned:
        self: Any = args[0]
        if self.failure is not None:
            raise RuntimeError(
                f"exchange: {self.failure} on this rank, which cannot go on where the others wait for that step; end "
                f"all ranks and start again, from a checkpoint"
            )
        try:
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.no_grad():
                    return part(*args, **kwargs)
            return part(*args, **kwargs)
        except WindowHeldError:  # nothing has begun
            raise
        except Exception as error:
            self.failure = f"{part.__name__} has failed ({type(error).__name__}: {error})".partition("\n")[0]
            raise

    return run
