"""The benchmarks run, and append comparable rows."""

import shutil
from itertools import product
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from dlrm_overlap.bench.drift_contenders import DRIFT_USUAL
from dlrm_overlap.bench.step_contenders import USUAL
from tests.conftest import read_rows, run_cli

pytestmark = pytest.mark.slow


def _bench(
    folder: Path, kind: str, *options: str, config: str = "bench/tiny", nproc: int = 2, timeout_s: float = 300
) -> tuple[list[dict[str, str]], CompletedProcess[str]]:
    """Run the benchmark `kind` on CPU ranks, and return its rows and the process's result."""
    output = folder / "rows" / f"{kind}.csv"
    argv = ["bench", kind, "--config", f"configs/{config}.yaml", "--nproc", str(nproc), "--train.device", "cpu"]
    result = run_cli(*argv, *options, "--output", str(output), timeout_s=timeout_s)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count(f"bench {kind}: a rehearsal, since times on CPUs say nothing about GPUs") == 1
    return read_rows(output), result


def test_input_appends_a_row(tmp_path: Path) -> None:
    options = ["--steps", "8", "--data.workers", "1", "--data.prefetch", "2"]
    (row,), _ = _bench(tmp_path, "input", *options, config="quickstart")
    assert (row["steps"], row["workers"], row["world_size"], row["global_batch"]) == ("8", "1", "2", "1024")
    ratio = float(row["loaded_mean_ms"]) / float(row["cached_mean_ms"])
    assert float(row["loaded_to_cached"]) == pytest.approx(ratio, rel=1e-2)
    assert float(row["cached_p10_ms"]) <= float(row["cached_median_ms"]) <= float(row["cached_p90_ms"])


def test_a_job_has_the_times_of_its_parts(tmp_path: Path) -> None:
    options = ["--train.steps", "20", "--train.eval_every", "10", "--checkpoint.every", "10", "--log.every", "5"]
    (row,), _ = _bench(tmp_path, "job", *options, config="quickstart")
    total_s = float(row["total_s"])
    assert 0 < float(row["evaluations_s"]) < total_s
    assert 0 < float(row["step_ms"]) < total_s * 1e3 / 20


def test_learning_compares_contenders_by_seed_and_continues(tmp_path: Path) -> None:
    argv = ["bench", "learning", "--config", "configs/quickstart.yaml", "--nproc", "2", "--train.device", "cpu"]
    argv += ["--train.steps", "40", "--train.eval_every", "20", "--seeds", "0", "1", "--target_auroc", "0.7"]
    argv += ["--output", str(output := tmp_path / "learning.csv")]
    result = run_cli(*argv, "--contenders", "torchrec")
    assert result.returncode == 0, result.stderr
    assert "rehearsal" not in result.stderr
    first = output.read_text()
    refused = run_cli(*argv)
    assert "--resume true" in refused.stderr
    result = run_cli(*argv, "--contenders", "torchrec", "pgas", "--resume", "true")
    assert result.returncode == 0, result.stderr
    assert output.read_text().startswith(first), "nothing is trained twice"
    rows = read_rows(output)
    points = [(row["contender"], row["seed"], row["step"], row["samples"]) for row in rows]
    assert points == [
        (name, seed, step, str(1024 * int(step)))
        for name in ("torchrec", "pgas")
        for seed in "01"
        for step in ("20", "40")
    ]
    for ours, theirs in zip(rows[4:], rows[:4], strict=True):
        assert float(ours["ne"]) == pytest.approx(float(theirs["ne"]), abs=1e-5)
        assert float(ours["seconds"]) > 0
    assert rows[0]["ne"] != rows[2]["ne"], "of another seed"
    assert "2 of 2" in result.stdout


def _numbers(row: dict[str, str]) -> dict[str, float]:
    suffixes = ("_ms", "_bytes", "_flop", "_per_s")
    return {key: float(value) for key, value in row.items() if key.endswith(suffixes) and value}


def _check_times(row: dict[str, str], baseline: dict[str, str]) -> dict[str, float]:
    """Check a row's agreement, times, limit and speedup; return the row's numbers."""
    assert float(row["max_difference"]) <= float(row["tolerance"])
    assert float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
    command = f"dlrm-overlap bench {row['kind']} --config configs/bench/tiny.yaml --train.device cpu"
    assert row["command"].startswith(command)
    assert row["command"].endswith("--nproc 2")
    value = _numbers(row)
    limits = [value[f"{of}_bytes"] / value[f"{of}_gb_per_s"] / 1e6 for of in ("hbm", "link")]
    assert value["limit_ms"] == pytest.approx(max(limits), rel=1e-2)
    assert float(row["fraction_of_limit"]) == pytest.approx(value["limit_ms"] / value["median_ms"], rel=1e-2)
    assert float(row["speedup"]) == pytest.approx(float(baseline["median_ms"]) / value["median_ms"], rel=1e-2)
    return value


def test_stage_measures_all_contenders_against_the_baseline(tmp_path: Path) -> None:
    rows, _ = _bench(tmp_path, "stage", "--iterations", "3")
    assert [row["contender"] for row in rows] == [
        "baseline", "nccl_chunked_2", "torchrec", "nccl", "pgas", "fused", "pgas_copied"
    ]  # fmt: skip
    for row in rows:
        shape = [row[key] for key in ("world_size", "tables", "dim", "global_batch", "steps")]
        assert shape == ["2", "6", "16", "128", "4"]
        value = _check_times(row, rows[0])
        assert value["link_bytes"] == 3 * 16 * 4 * 64, "a rank pools 3 tables for the other's 64 samples"
        assert ("lookup_ms" in value) == (row["contender"] == "baseline")
        assert value["gpu_ms"] > 0


@pytest.mark.parametrize("wire_dtype", ["auto", "fp32"])
def test_stage_delivers_what_the_dense_part_takes(tmp_path: Path, wire_dtype: str) -> None:
    options = ["--train.precision", "bf16", "--embedding.wire_dtype", wire_dtype]
    rows, _ = _bench(tmp_path, "stage", "--iterations", "2", *options)
    wire = "bf16" if wire_dtype == "auto" else "fp32"
    assert {(row["wire_dtype"], row["precision"]) for row in rows} == {(wire, "bf16")}
    assert {int(row["link_bytes"]) for row in rows} == {3 * 16 * 64 * (2 if wire == "bf16" else 4)}


def test_backward_measures_all_contenders_under_each_optimizer(tmp_path: Path) -> None:
    """Ranks have three and two tables, ids are skewed, and the wire's type is bf16."""
    options = ["--data.tables.count", "5", "--embedding.wire_dtype", "bf16", "--data.tables.zipf_alpha", "1.05"]
    rows, _ = _bench(tmp_path, "backward", "--optimizers", "sgd", "adagrad", "--iterations", "3", *options)
    expected = list(product(("sgd", "adagrad"), ("baseline", "push", "push_exposed")))
    assert [(row["optimizer"], row["contender"]) for row in rows] == expected
    for row in rows:
        first = rows[0] if row["optimizer"] == "sgd" else rows[3]
        value = _check_times(row, first)
        # The rank with two tables sends most: the gradient of its own 64 samples, of three tables.
        assert value["link_bytes"] == 3 * 16 * 2 * 64
        assert int(row["ids"]) == int(first["ids"])
        assert ("prepare_ms" in value) == (row["contender"] != "baseline")


def test_a_sweep_measures_every_shape(tmp_path: Path) -> None:
    options = ["--pooling_factors", "1", "4", "--dims", "8", "16", "--global_batches", "64", "--iterations", "1"]
    rows, _ = _bench(tmp_path, "sweep", "--data.tables.count", "null", "--data.tables.rows", "[9,8,7,6]", *options)
    expected = product(("8", "16"), ("1", "4"), ("baseline", "nccl_chunked_2", "pgas", "fused"))
    assert [(row["dim"], row["pooling_factor"], row["contender"]) for row in rows] == list(expected)


def test_a_rank_alone_has_no_chunks(tmp_path: Path) -> None:
    rows, _ = _bench(tmp_path, "stage", "--iterations", "1", nproc=1)
    assert [row["contender"] for row in rows] == ["baseline", "torchrec", "nccl", "pgas", "fused", "pgas_copied"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_step_measures_all_contenders(tmp_path: Path) -> None:
    names = [*USUAL[:-1], "torchrec_strongest_bf16_gradients", USUAL[-1]]
    options = ["--train.batch_size", "64", "--steps", "8", "--batches", "3", "--at_once", "7", "--contenders", *names]
    options += ["--model.bottom_mlp", "[16]", "--model.top_mlp", "[16, 1]"]  # g++ compiles each layer's kernels
    rows, result = _bench(tmp_path, "step", *options, config="quickstart", timeout_s=400)
    assert "median_ms" in result.stdout
    assert "floor" not in result.stdout, "it is a GPU's"
    assert [row["contender"] for row in rows] == names
    assert rows[-2]["max_difference"] != rows[1]["max_difference"], "gradients are rounded"
    for row in rows:
        assert (row["world_size"], row["tables"], row["global_batch"], row["steps"]) == ("2", "8", "128", "8")
        assert float(row["max_difference"]) <= float(row["tolerance"])
        value = _numbers(row)
        times = [value["dense_ms"]]
        times += [value[f"{of}_bytes"] / value[f"{of}_gb_per_s"] / 1e6 for of in ("hbm", "link")]
        assert (value["floor_ms"], value["floor_sum_ms"]) == pytest.approx((max(times), sum(times)), rel=1e-2)
    for row in rows:
        fastest = min(float(each["median_ms"]) for each in rows if each["contender"].startswith("torchrec"))
        assert float(row["speedup"]) == pytest.approx(fastest / float(row["median_ms"]), rel=1e-2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_the_losses_of_torchrec_with_other_settings_agree_with_its_own(tmp_path: Path) -> None:
    names = [f"torchrec_{name}" for name in ("strongest_bf16_biases", "strongest_pt2", "our_dense")]
    # g++ takes two seconds of a core for each kernel that torch.compile makes, so layers and tables are few.
    options = ["--model.arch", "dcn", "--model.cross_layers", "1", "--model.top_mlp", "[16, 1]"]
    options += ["--model.bottom_mlp", "[16]", "--data.tables.rows", "[2000, 500]"]
    options += ["--data.tables.multi_hot", "[4, 0..6]", "--train.precision", "bf16"]
    options += ["--train.batch_size", "64", "--steps", "4", "--batches", "3"]
    options += ["--contenders", "torchrec", *names, "pgas_graph_no_capture"]
    rows, _ = _bench(tmp_path, "step", *options, config="quickstart", timeout_s=600)
    assert [row["contender"] for row in rows] == ["torchrec", *names, "pgas_graph_no_capture"]
    difference = {row["contender"]: row["max_difference"] for row in rows}
    assert all(float(row["max_difference"]) <= float(row["tolerance"]) for row in rows)
    assert len(set(difference.values())) == len(difference), "each rounds in its own way"


def test_collectives_measures_all_that_can_take_part(tmp_path: Path) -> None:
    rows, _ = _bench(tmp_path, "collectives", "--sizes_mb", "1", "--iterations", "3")
    assert [(row["beside"], row["contender"]) for row in rows] == [("nothing", "nccl"), ("compute", "nccl")]
    for row in rows:
        assert (row["mb_per_peer"], row["captured"], row["steps"], row["world_size"]) == ("1", "False", "3", "2")
        assert float(row["p10_ms"]) <= float(row["median_ms"]) <= float(row["p90_ms"])
        assert float(row["gb_per_s"]) == pytest.approx((1 << 20) / float(row["median_ms"]) / 1e6, rel=1e-2)
        assert (row["product_ms"] != "") == (row["beside"] == "compute")


def test_gemm_measures_what_runs_on_a_cpu(tmp_path: Path) -> None:
    rows, _ = _bench(tmp_path, "gemm", "--shapes", "16x24x32", "--repetitions", "2")
    expected = list(product(("all_gather", "reduce_scatter"), ("serial", "auto")))
    assert [(row["operator"], row["contender"]) for row in rows] == expected
    for row in rows:
        assert (row["world_size"], row["m"], row["k"], row["n"], row["link_bytes"]) == ("2", "16", "24", "32", "384")
        assert float(row["floor_ms"]) <= float(row["gemm_ms"]) + 384 / float(row["link_gb_per_s"]) / 1e6


def test_drift_trains_all_designs_on_the_same_ids(tmp_path: Path) -> None:
    output = tmp_path / "drift.csv"
    argv = ["bench", "drift", "--config", "configs/bench/drift.yaml", "--nproc", "2", "--train.device", "cpu"]
    argv += ["--train.steps", "6", "--days", "3", "--seeds", "4", "--train.global_batch_size", "64"]
    argv += ["--data.tables.rows", "300", "--data.tables.drift", "128", "--embedding.id_tables.rows", "256"]
    result = run_cli(*argv, "--output", str(output), timeout_s=300)
    assert result.returncode == 0, result.stderr
    assert "found no row" not in result.stderr
    rows = read_rows(output)
    assert [row["contender"] for row in rows] == [name for name in DRIFT_USUAL for _ in range(3)]
    of = {name: [row for row in rows if row["contender"] == name] for name in DRIFT_USUAL}
    distinct = [int(row["distinct_ids"]) for row in of["any"]]
    for name, own in of.items():
        assert [int(row["distinct_ids"]) for row in own] == distinct, "the same samples"
        assert {row["seed"] for row in own} == {"4"}
        assert all(0 < float(row["ne"]) < 10 for row in own)
        assert name == "unlimited" or own[0]["table_rows"] == ("2048" if name == "modulus_twice" else "1024")
    inserted = [sum(int(row["ids_inserted"]) for row in of["unlimited"][:day]) for day in (1, 2, 3)]
    assert inserted == distinct, "each id once: the maps count what other code counted in the stream"
    assert {(row["ids_evicted"], row["no_row"]) for row in of["unlimited"]} == {("0", "0")}
    assert distinct[0] < sum(int(row["ids_inserted"]) for row in of["any"]) <= distinct[-1]
    assert float(of["any_admit_2"][0]["no_row"]) > 0
    assert 0 < float(of["modulus_twice"][-1]["rows_used"]) < float(of["modulus"][-1]["rows_used"]) < 1
    for name in DRIFT_USUAL:
        assert f"{name}, seed 4: mean NE {of[name][-1]['mean_ne']}" in result.stdout
