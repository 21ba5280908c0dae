"""The balanced plan cuts a table of many ids by rows: training, evaluation and checkpoints are as with whole tables."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_overlap.config import InputError
from dlrm_overlap.embedding.sharder import OverlapEmbeddingBagCollectionSharder
from tests.agreement import EVAL_TOLERANCE, LOSS_TOLERANCE
from tests.conftest import read_metrics
from tests.distributed.models import CPU, SUM, Tables, table_configs, world
from tests.distributed.workers import make_trainer, quickstart, ran_on_ranks, run_ranks, train

OPTIONS = ["--data.tables.multi_hot", "[40, 0..6, 1, 1, 2, 1, 1, 1]", "--data.eval_samples", "1001"]
OPTIONS += ["--train.global_batch_size", "256", "--checkpoint.every", "10"]
WHOLE = ["--embedding.plan", "table_wise"]
RUNS = {  # name -> its keys
    "whole": WHOLE,
    "torchrec": [],
    "pgas": ["--embedding.backend", "pgas"],
    "captured": ["--embedding.backend", "fused", "--train.pipeline", "graph"],
}


def _refuse_unlike_plans(_: Path) -> None:
    """Rank 1 has another owner for the second of two tables."""
    tables: Tables = {"a": (5, 4, ["x"], SUM), "b": (5, 4, ["y"], SUM)}
    sharder: Any = OverlapEmbeddingBagCollectionSharder()
    ways = {"a": table_wise(0), "b": table_wise(dist.get_rank())}
    module = EmbeddingBagCollection(table_configs(tables), device=torch.device("meta"))
    plan = construct_module_sharding_plan(module, ways, sharder, 2, 2, "cpu")
    with pytest.raises(
        InputError, match=r"rank 0 shards table b table_wise by .* on ranks .0., rank 1 .* on ranks .1."
    ):
        sharder.shard(module, dict(plan), ShardingEnv.from_process_group(world()), CPU)


def test_unlike_plans_are_refused_on_every_rank(tmp_path: Path) -> None:
    run_ranks(_refuse_unlike_plans, 2, tmp_path)


def _train_all(folder: Path) -> None:
    for name, keys in RUNS.items():
        train(quickstart(folder, name, *OPTIONS, "--train.steps", "20", *keys))
    trainer = make_trainer(quickstart(folder, "plan", *OPTIONS))
    plan = trainer.checkpointer.about["plan"]
    by_rows = [table for table, sharded in plan.items() if sharded["sharding"] == "row_wise"]
    assert by_rows == ["t_00"]
    trainer.close()
    for name, start, keys in (("pgas_from_whole", "whole", RUNS["pgas"]), ("whole_from_pgas", "pgas", WHOLE)):
        resume = ["--checkpoint.resume", str(folder / start / "checkpoints" / "step_10")]
        train(quickstart(folder, name, *OPTIONS, "--train.steps", "20", *keys, *resume))
        dist.barrier()


folder = ran_on_ranks(2, _train_all)


@pytest.mark.parametrize("name", ["torchrec", "pgas", "captured", "pgas_from_whole", "whole_from_pgas"])
def test_a_table_cut_by_rows_trains_as_a_whole_one(folder: Path, name: str) -> None:
    losses, expected = (read_metrics(folder / run, "train/loss") for run in (name, "whole"))
    assert list(losses) == list(range(11 if "from" in name else 1, 21))
    assert losses == pytest.approx({step: expected[step] for step in losses}, rel=LOSS_TOLERANCE["adagrad"], abs=0)
    auroc = read_metrics(folder / name, "eval/auroc")[20]
    assert auroc == pytest.approx(read_metrics(folder / "whole", "eval/auroc")[20], rel=EVAL_TOLERANCE)
