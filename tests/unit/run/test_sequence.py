"""A model that attends to histories learns what one that pools them cannot."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dlrm_overlap.checkpoint.checkpoint import checkpoint_shape
from dlrm_overlap.config import Config, SequenceConfig
from dlrm_overlap.data.batch import Batch
from dlrm_overlap.data.loader import open_datasets
from dlrm_overlap.observe.metrics import evaluation_metrics
from dlrm_overlap.train.explain import explain
from tests.conftest import configuration
from tests.distributed.workers import make_trainer

pytestmark = [pytest.mark.usefixtures("world_of_one"), pytest.mark.filterwarnings("ignore::FutureWarning")]
MARGIN = 0.03  # of AUROC


def _config(folder: Path, *options: str) -> Config:
    argv = ["--config", "configs/sequence.yaml", "--train.device", "cpu", "--log.dir", str(folder)]
    argv += ["--log.tensorboard", "false", "--train.steps", "150", "--train.eval_every", "0"]
    return configuration(*argv, "--data.eval_samples", "8192", "--checkpoint.last", "false", *options)


def _pooled(config: Config) -> Config:
    return replace(config, model=replace(config.model, sequence=SequenceConfig()))


def _reversed(batch: Batch, table: int) -> Batch:
    tables = batch.sparse.lengths().view(len(batch.sparse.keys()), -1)
    values = list(batch.sparse.values().split(tables.sum(1).tolist()))
    values[table] = torch.cat([bag.flip(0) for bag in values[table].split(tables[table].tolist())])
    return Batch.from_tensors(batch.dense, batch.sparse.lengths(), torch.cat(values), batch.labels)


def test_attention_beats_pooling_and_knows_the_order(tmp_path: Path) -> None:
    config = _config(tmp_path)
    pooled = make_trainer(_pooled(config)).fit()["eval_auroc"]
    trainer = make_trainer(replace(config, log=replace(config.log, name="attends")))
    attends = trainer.fit()["eval_auroc"]
    assert attends > pooled + MARGIN, (attends, pooled)
    batch = open_datasets(config.data)[1].read(0, 8192)
    trainer.model.eval()
    auroc = []
    for each in (batch, _reversed(batch, 2)):
        trainer.pipeline.reset()
        with torch.no_grad():
            auroc.append(evaluation_metrics(trainer.pipeline.progress(iter([each]))[1], each.labels)["auroc"])
    assert auroc[0] > auroc[1] + MARGIN, auroc


def test_explain_names_the_history_and_its_exchange(tmp_path: Path) -> None:
    model = make_trainer(_config(tmp_path, "--embedding.backend", "pgas")).model
    found = {each.table: (each.module, each.exchanged) for each in explain(model).tables}
    assert found == {f"t_0{t}": (f"dlrm.{'history' if t == 2 else 'embedding'}", True) for t in range(3)}


def test_checkpoints_of_pooled_models_know_nothing_of_sequences(tmp_path: Path) -> None:
    config = _config(tmp_path)
    kept = {"model.sequence.history": 2, "model.sequence.candidate": 1, "model.sequence.positions": 64}
    shape = checkpoint_shape(config, [3, 3, 3], 13)
    assert kept.items() <= shape.items()
    shape = checkpoint_shape(_pooled(config), [3, 3, 3], 13)
    assert [key for key in shape if "sequence" in key] == ["model.sequence.history"]
    assert shape["model.sequence.history"] is None, "as in a checkpoint that lacks the key"
