"""Deltas of captured steps: a checkpoint and the deltas after it are the trained weights, to the last bit."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dlrm_overlap.checkpoint.apply_deltas import apply
from dlrm_overlap.checkpoint.delta_files import deltas_in, read_delta
from dlrm_overlap.checkpoint.storage import read_weights
from dlrm_overlap.config import CheckpointConfig, IdTablesConfig
from dlrm_overlap.train.graphs.train_pipeline import GraphTrainPipeline
from tests.gpu.exchange.checks.training import make_trainer, small_config
from tests.gpu.exchange.place import Check, Place, every

_SCORES = ("_used_at", "_clock", "_hash_zch_metadata")
_TABLES: dict[str, dict[str, Any]] = {"rows": {}, "columns": {}, "any": {"ids": "any"}}


def _check_chain(place: Place, backend: str, tables: str) -> None:
    config = small_config(place, backend, "adagrad", "column_wise" if tables == "columns" else "auto", pipeline="graph")
    config = replace(
        config,
        data=replace(config.data, tables=replace(config.data.tables, **_TABLES[tables])),
        embedding=replace(config.embedding, id_tables=IdTablesConfig(rows=512)),
        train=replace(config.train, eval_every=0),
        log=replace(config.log, name=f"deltas_{backend}_{tables}", tensorboard=False),
        checkpoint=CheckpointConfig(delta_every=4, keep=9, asynchronous=True, every=8, resume="never"),
    )
    trainer = make_trainer(place, config)
    assert isinstance(trainer.pipeline, GraphTrainPipeline)
    trainer.fit()
    folder, steps = trainer.folder, trainer.steps
    place.close(trainer)
    weights = read_weights(folder / "checkpoints/step_8")
    for step, path in deltas_in(folder / "deltas").items():
        if step > 8:
            apply(path, read_delta(path), weights)
    expected = read_weights(folder / f"checkpoints/step_{steps}")
    differing = {name for name, each in expected.items() if not torch.equal(each, weights[name])}
    assert {name for name in differing if not name.endswith(_SCORES)} == set()
    dist.barrier(place.group)


CHECKS: dict[str, Check] = every("deltas", _check_chain, backend=("pgas", "fused"), tables=tuple(_TABLES))
