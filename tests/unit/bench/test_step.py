import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from dlrm_overlap.bench.figures import step
from dlrm_overlap.bench.harness.agreement import judge_losses
from dlrm_overlap.bench.harness.limits import products_of
from dlrm_overlap.bench.step_contenders import STEP_CONTENDERS, Keys, expand, split_into_groups
from dlrm_overlap.config import EmbeddingConfig, ModelConfig, SequenceConfig
from dlrm_overlap.embedding.traffic import count_dense, dense_layers
from dlrm_overlap.launching.lifetime import DISAGREEMENT
from dlrm_overlap.train.model import build_model
from tests.conftest import read_rows, refuses
from tests.distributed.workers import quickstart, ranks_here
from tests.unit.bench.conftest import values_of

CPU = torch.device("cpu")
SMALL = ["--train.batch_size", "64", "--train.steps", "4"]
EAGER = {"train.graph_dense": False, "train.compile_dense": False}


def test_every_contender_is_a_configuration_that_trains(tmp_path: Path) -> None:
    config = quickstart(tmp_path, "run")
    for keys in STEP_CONTENDERS.values():
        made = step.contender_config(config, keys, "cuda")
        assert made.embedding.backend == keys["embedding.backend"]
        assert made.train.graph_dense == keys["train.graph_dense"]
        assert not step.contender_config(config, keys, "cpu").train.graph_dense


def test_index_dedup_is_for_unpooled_tables(tmp_path: Path) -> None:
    config = quickstart(tmp_path, "run").embedding
    unpooled: Any = step._sharders_with_index_dedup(config, "bf16", 0, fused_params={"output_dtype": None})[1]
    assert unpooled._use_index_dedup
    assert "output_dtype" in unpooled.fused_params


@pytest.mark.parametrize("has_it", [False, True])
def test_a_contender_that_this_torchrec_cannot_run_is_left_out(monkeypatch: pytest.MonkeyPatch, has_it: bool) -> None:
    def pipeline(async_inplace_copy: bool = False) -> None: ...

    monkeypatch.setattr(step, "TrainPipelineSparseDist", pipeline if has_it else lambda: None)
    strongest = expand(["torchrec", "strongest", "pgas_graph"])
    newer = ("torchrec_strongest_async_copy", "torchrec_strongest_default_plan_async_copy")
    assert set(newer) < set(strongest)
    names, missing = step.split_by_installed(strongest)
    assert missing == (() if has_it else newer)
    assert names == tuple(name for name in strongest if name not in missing)
    if not has_it:
        with refuses("need TrainPipelineSparseDist"):
            step.split_by_installed(newer)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_copy_thread_is_given_to_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(step, "TrainPipelineSparseDist", lambda *_, **options: given.update(options))
    step._pipeline_with_copy_thread(None, None, CPU)
    assert given == {"execute_all_batches": True, "enable_inplace_copy_batch": True, "async_inplace_copy": True}


def test_the_last_contender_takes_turns_with_all_others() -> None:
    assert split_into_groups("abcde", 3) == [("a", "b", "e"), ("c", "d", "e")]
    assert split_into_groups("abcd", 4) == [("a", "b", "c", "d")]
    assert split_into_groups("a", 2) == [("a",)]
    assert expand(["pgas", "ablation"]) == expand(["ablation"]), "each once"


def test_the_strongest_is_the_fastest_of_torchrec_that_agrees_by_each_time() -> None:
    rows = [
        ("torchrec", 8.0, 6.0, 4.0, True),
        ("torchrec_strongest", 6.0, 5.0, 5.0, True),
        ("torchrec_strongest_bf16", 7.0, 4.0, 4.5, True),
        ("torchrec_our_dense", 1.5, 0.5, 1.0, True),  # not TorchRec's step alone
        ("torchrec_strongest_fp16", 1.0, 1.0, 1.0, False),
        ("pgas_graph", 2.0, 1.0, 2.0, True),
    ]
    columns = ("contender", "median_ms", "busy_ms", "work_ms", "agrees")
    *_, wrong, ours = step.with_speedups([dict(zip(columns, row, strict=True)) for row in rows])
    speedups = ("speedup", "busy_speedup", "work_speedup")
    assert [ours[each] for each in speedups] == [3.0, 4.0, 2.0]
    assert [wrong[each] for each in speedups] == [None] * 3


@pytest.mark.parametrize("arch", ["dot", "dcn"])
def test_dense_counts_are_those_of_the_model(arch: Any) -> None:
    sequence = SequenceConfig(history=1 if arch == "dot" else None, positions=7, heads=3)
    sizes = {"bottom_mlp": [12, 8], "top_mlp": [10, 6, 1], "cross_layers": 2, "cross_rank": 5}
    model = ModelConfig(arch=arch, dim=8, sequence=sequence, **sizes)
    tables, features, samples = 3, 13, 16
    dlrm = build_model(model, EmbeddingConfig(), [7] * tables, features, 0)
    pooled = torch.randn(samples, tables * model.dim, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        dlrm.head(dlrm.bottom(torch.randn(samples, features)), pooled).sum().backward()
        if arch == "dot":
            candidate = torch.randn(samples, 8, requires_grad=True)
            dlrm.attention(candidate, torch.randn(20, 8), torch.ones(samples, dtype=torch.int32)).sum().backward()
    counts = count_dense(model, tables, features, samples)
    # The model multiplies each pair twice, and each feature by itself.
    twice = 6 * model.dim * ((tables + 1) ** 2 - tables * (tables + 1) // 2) * samples if arch == "dot" else 0
    # Scores and sums of 3 heads, of 8 keys; the model takes 19 pages of 8 rows, and 16 vectors of positions a sample.
    attended = 12 * 3 * 8 * (samples * 8 - 19 * 8 - samples * 16) if arch == "dot" else 0
    assert counts.flop == counter.get_total_flops() - twice + attended
    layers = dense_layers(model, tables, features)
    with FlopCounterMode(display=False) as alone:
        products_of(layers, samples, torch.float32, CPU)()
    others = tables * (tables + 1) // 2 + 2 * 3 * 8 if arch == "dot" else 0  # pairs of features, and of heads and keys
    assert alone.get_total_flops() == counts.flop - 6 * model.dim * others * samples
    tables = ("embedding.", "history.")
    parts = [each for name, each in dlrm.named_parameters() if not name.startswith(tables)]
    assert counts.parameters == sum(parameter.numel() for parameter in parts)


def test_a_loss_may_differ_by_rounding_or_by_what_the_reference_differs_from_itself() -> None:
    expected, again = [1.0, 1.0, 2.0, 2.0], [1.0, 1.0001, 2.0, 2.0]
    for precision, same, differing in (("fp32", 1e-4, 4e-4), ("bf16", 3e-4, 4e-4)):
        for other, tolerance in ((expected, same), (again, differing)):
            losses = {"torchrec": expected, "near": [1.0, 1.0, 2.0, 2.0 * (1 + 0.9 * tolerance)]}
            losses["far"] = [1.0, 1.0, 2.0, 2.0 * (1 + 1.1 * tolerance)]
            agreements, (fault,) = judge_losses(precision, losses, other)
            assert [each.agrees for each in agreements.values()] == [True, True, False]
            assert agreements["far"].tolerance == pytest.approx(tolerance)
            assert fault.startswith("far: its loss differs from torchrec's by")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_losses_that_are_not_finite_do_not_agree(bad: float) -> None:
    agreements, _ = judge_losses("fp32", {"a": [1.0, 2.0], "b": [1.0, bad]}, [1.0, 2.0])
    assert [each.agrees for each in agreements.values()] == [True, False]
    for expected, again in (([1.0, bad], [1.0, 2.0]), ([1.0, 2.0], [1.0, bad]), ([1.0, bad], [1.0, bad])):
        agreements, _ = judge_losses("fp32", {"a": expected, "b": expected}, again)
        assert not any(each.agrees for each in agreements.values())


def test_nobody_is_judged_by_a_reference_that_differs_from_itself() -> None:
    losses = {"torchrec": [1.0, 1.0], "pgas": [1.0, 1.0]}
    agreements, (fault,) = judge_losses("bf16", losses, [1.0, 1.02])
    assert not any(agreement.agrees for agreement in agreements.values())
    assert fault.startswith("torchrec: its own losses differ by 2.0e-02, relatively, between two runs")


def _run(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    contenders: Mapping[str, Keys],
    *options: str,
    resume: bool = False,
    steps: int = 6,
) -> Any:
    for name, contender in contenders.items():
        monkeypatch.setitem(STEP_CONTENDERS, name, contender)
    ranks = ranks_here(quickstart(folder, "run", *SMALL, *options))
    values = values_of("step", "--steps", str(steps), "--batches", "3", "--output", str(folder / "step.csv"))
    values.contenders, values.resume = list(contenders), resume
    code = step.run("step", replace(ranks, values=values))
    return code, read_rows(folder / "step.csv")


_TORCHREC = {"torchrec": {"embedding.backend": "torchrec", **EAGER}}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_tables_that_learn_a_tenth_faster_are_found_out_and_get_no_speedup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_of_one: dist.ProcessGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"other": {"embedding.backend": "pgas", "embedding.lr": 0.0033, **EAGER}}
    code, (torchrec, wrong) = _run(tmp_path, monkeypatch, _TORCHREC | other)
    assert code == DISAGREEMENT
    assert (torchrec["agrees"], wrong["agrees"]) == ("True", "False")
    assert float(torchrec["speedup"]) == 1
    assert wrong["speedup"] == ""
    assert float(wrong["median_ms"]) > 0
    assert "dlrm-overlap: other: its loss differs from torchrec's by" in capsys.readouterr().err
    assert _run(tmp_path, monkeypatch, _TORCHREC | other, resume=True) == (DISAGREEMENT, [torchrec, wrong])
    assert capsys.readouterr().out.startswith("nothing is left to measure; rows in ")
    with refuses(r"--output: .* has rows with global_batch \d+, and this run has 16; give another file"):
        _run(tmp_path, monkeypatch, _TORCHREC | other, "--train.global_batch_size", "16", resume=True)
    with refuses(r"--output: .* has rows with steps 8, and this run has 12; give another file, or the same"):
        _run(tmp_path, monkeypatch, _TORCHREC | other, resume=True, steps=9)
    with refuses(r"has rows with config \w{12}, and this run has \w{12}; give another file, or .* as its command: \w+"):
        _run(tmp_path, monkeypatch, _TORCHREC | other, "--model.top_mlp", "[128, 1]", resume=True)


@pytest.mark.usefixtures("world_of_one")
def test_what_one_contender_cannot_do_is_refused_before_the_first_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step, "build", lambda *_: pytest.fail("a contender was built"))
    other = {"other": {"embedding.backend": "pgas", "train.precision": "tf32"}}
    with refuses(r"train\.precision: tf32 needs a GPU"):
        _run(tmp_path, monkeypatch, _TORCHREC | other)
