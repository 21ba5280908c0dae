"""Counts the training steps of a program that `dlrm-overlap profile` has started; Python reads it before the program.

It loads nothing of torch itself: a program may change the environment before it does.
"""

import importlib.util
import json
import os
import sys
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_OWN_FOLDER = Path(__file__).parent


@cache
def counted_program():
    """Return what counts the steps of this process; called in its first step."""
    sys.path.append(str(_OWN_FOLDER.parents[2]))  # last, so that it hides nothing
    from dlrm_overlap.train.profile_command import SETTINGS
    from dlrm_overlap.train.profiling import CountedProgram

    return CountedProgram(**json.loads(os.environ[SETTINGS]))


def count_optimizers(module: ModuleType) -> None:
    """Count the steps of the optimizers of torch.optim; `module` is torch.optim.optimizer."""
    module.register_optimizer_step_post_hook(lambda optimizer, *_: counted_program().count_step_of(optimizer))


def count_pipelines(module: ModuleType) -> None:
    """Count the training steps of each TrainPipeline that is made; `module` is where TorchRec defines it."""

    def make(cls, *args, **kwargs):
        pipeline = object.__new__(cls)
        progress = pipeline.progress

        def counted(batches):
            output = progress(batches)
            model = getattr(pipeline, "_model", None)
            if model is not None and model.training:
                counted_program().count_step_of(pipeline, model)
            return output

        pipeline.progress = counted
        return pipeline

    module.TrainPipeline.__new__ = make


class AfterImport:
    """Finds a module as Python does, and calls a function with it once it is loaded."""

    def __init__(self, name, then) -> None:
        self.name, self.then = name, then

    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        """Return the spec of the module, for Python's import."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_call(module: ModuleType) -> None:
                load(module)
                self.then(module)

            spec.loader.exec_module = load_and_call
        return spec


sys.meta_path.insert(0, AfterImport("torch.optim.optimizer", count_optimizers))
sys.meta_path.insert(0, AfterImport("torchrec.distributed.train_pipeline.train_pipelines", count_pipelines))

# The sitecustomize that this one hides, such as a distribution's.
sys.path.remove(str(_OWN_FOLDER))
own_module = sys.modules.pop("sitecustomize")
if importlib.util.find_spec("sitecustomize") is not None:
    importlib.import_module("sitecustomize")
sys.modules.setdefault("sitecustomize", own_module)
