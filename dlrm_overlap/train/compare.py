"""Trains one configuration with several backends in turn; `observe.comparison` compares the results."""

import dataclasses
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from dlrm_overlap.checkpoint.saving import NotFiniteError
from dlrm_overlap.config import Config
from dlrm_overlap.observe.run_folder import hold_run_folder
from dlrm_overlap.train.trainer import Trainer

log = logging.getLogger("dlrm_overlap")


def run_configs(config: Config, backends: Sequence[str], noise_runs: int = 0) -> dict[str, Config]:
    """Return run -> its configuration, trained from the first step and without checkpoints and deltas.

    Runs have the names of their backends; repeats of the first one are torchrec_again, torchrec_again_2, ..
    """
    checkpoint = dataclasses.replace(config.checkpoint, resume="never", every=0, last=False, delta_every=0)
    configs = {}
    again = [f"{backends[0]}_again" + (f"_{i}" if i > 1 else "") for i in range(1, noise_runs + 1)]
    for name in [backends[0], *again, *backends[1:]]:
        backend = backends[0] if name in again else name
        embedding = dataclasses.replace(config.embedding, backend=backend)
        run_log = dataclasses.replace(config.log, name=name if name in again else None, overwrite=True)
        configs[name] = dataclasses.replace(config, embedding=embedding, checkpoint=checkpoint, log=run_log)
    return configs


def train_runs(configs: Mapping[str, Config], make_trainer: Callable[[Config], Trainer]) -> dict[str, Path]:
    """Train each of `configs` in turn and return run -> its folder; a collective."""
    folders: dict[str, Path] = {}
    with ExitStack() as stack:
        for name, config in configs.items():
            trainer = make_trainer(config)
            if not folders:
                stack.enter_context(hold_run_folder(Path(config.log.dir)))
            folders[name] = config.folder
            log.info("backend %s", config.folder.name)
            try:
                trainer.fit()
            except NotFiniteError as error:  # on every rank at the same step; `compare_runs` finds it in the losses
                log.info("backend %s: %s", name, error)
            trainer.close()
            del trainer
            gc.collect()  # a trainer has reference cycles
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
    return folders
