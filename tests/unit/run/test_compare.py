import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from dlrm_overlap.checkpoint.saving import NotFiniteError
from dlrm_overlap.config import Config
from dlrm_overlap.observe.comparison import compare_runs, comparison_rows, report
from dlrm_overlap.train.compare import run_configs, train_runs
from tests.conftest import configuration

REFERENCE = {20: 0.5, 40: 0.4, 60: 0.2}


def _run(folder: Path, losses: dict[int, float | None], step_ms: float = 10.0) -> Path:
    folder.mkdir()
    records: list[dict[str, Any]] = [{"step": step, "train/loss": loss} for step, loss in losses.items()]
    records.append({"step": max(losses), "eval/auroc": 0.8})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    summary: dict[str, Any] = {"train_loss": losses[max(losses)], "eval_loss": 0.4, "eval_auroc": 0.8, "eval_ne": 0.9}
    summary |= {"steps": max(losses), "samples_per_s": 1e6, "step_ms_p50": step_ms, "step_ms_p95": 2 * step_ms}
    summary |= {"world_size": 4, "device": "cpu", "global_batch_size": 64, "versions": {"torch": "2"}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _config(folder: Path, *options: str) -> Config:
    return configuration("--config", "configs/quickstart.yaml", "--log.dir", str(folder), *options)


def _compared(folder: Path, losses: dict[str, dict[int, float | None]], noise_runs: int = 0) -> dict[str, Any]:
    return compare_runs({name: _run(folder / name, each) for name, each in losses.items()}, 1e-4, noise_runs)


def test_runs_that_agree_get_their_speedup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = _run(tmp_path / "torchrec", {**REFERENCE}, 10.0)
    fast = _run(tmp_path / "pgas", {**REFERENCE, 60: 0.2 * (1 + 5e-5)}, 4.0)
    assert report({"torchrec": slow, "pgas": fast}, 1e-4, tmp_path / "comparison.json") == []
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert (comparison["reference"], comparison["rtol"], comparison["agree"]) == ("torchrec", 1e-4, True)
    assert (comparison["world_size"], comparison["device"], comparison["global_batch_size"]) == (4, "cpu", 64)
    assert comparison["versions"] == {"torch": "2"}
    result = comparison["backends"]["pgas"]
    assert (result["agree"], result["fault"]) == (True, None)
    assert result["max_relative_difference"] == pytest.approx(5e-5)
    assert result["speedup"] == 2.5
    assert comparison["backends"]["torchrec"]["speedup"] == 1.0
    _, reference, faster, note = capsys.readouterr().out.splitlines()
    assert reference.split()[-2:] == ["1.00", "reference"]
    assert faster.endswith("2.50  agree to 5.0e-05")
    assert note.startswith("On CPUs")


def test_no_speedup_where_losses_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = {
        "torchrec": _run(tmp_path / "torchrec", {**REFERENCE}, 10.0),
        "pgas": _run(tmp_path / "pgas", {**REFERENCE}, 5.0),
        "fused": _run(tmp_path / "fused", {**REFERENCE, 40: None}, 1.0),
    }
    (line,) = report(folders, 1e-4, tmp_path / "comparison.json")
    assert line == "fused against torchrec: step 40: loss nan against 0.4, not finite; tolerance 0.0001"
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert comparison["agree"] is False
    assert [result["agree"] for result in comparison["backends"].values()] == [True, True, False]
    assert [result["speedup"] for result in comparison["backends"].values()] == [1.0, 2.0, None]
    _, _, agreeing, broken, _ = capsys.readouterr().out.splitlines()
    assert agreeing.split()[-2:] == ["2.00", "identical"]
    assert broken.split()[-2:] == ["-", "DISAGREE"]


DAMAGED = [b"", b"[1]\n", b"{", b"\xff\x00", b'{"step": Infinity, "train/loss": 1}\n']
DAMAGED += [b'{"step": 20, "train/loss": %s}\n' % loss for loss in (b"[1]", b"1" + b"0" * 400)]


@pytest.mark.parametrize("damaged", ["torchrec", "pgas"])
@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl"])
@pytest.mark.parametrize("content", DAMAGED)
def test_damaged_results_agree_with_nothing(tmp_path: Path, damaged: str, file: str, content: bytes) -> None:
    folders = {name: _run(tmp_path / name, {**REFERENCE}) for name in ("torchrec", "pgas")}
    (folders[damaged] / file).write_bytes(content)
    (line, *_) = report(folders, 1e-4, tmp_path / "comparison.json")
    assert "against torchrec: " in line
    result = json.loads((tmp_path / "comparison.json").read_text())["backends"]["pgas"]
    assert (result["agree"], result["speedup"]) == (False, None)


def test_nothing_is_faster_than_a_broken_reference(tmp_path: Path) -> None:
    comparison = _compared(tmp_path, {"torchrec": {**REFERENCE, 60: None}, "pgas": {**REFERENCE}})
    assert [result["speedup"] for result in comparison["backends"].values()] == [None, None]
    assert comparison["agree"] is False
    assert "inf" not in str(comparison_rows(comparison))


def test_runs_differ_in_the_backend_alone_and_resume_nothing(tmp_path: Path) -> None:
    config = _config(tmp_path, "--checkpoint.every", "50", "--checkpoint.delta_every", "5")
    first, second = (config.as_dict() for config in run_configs(config, ["pgas", "torchrec"]).values())
    assert (first["embedding"].pop("backend"), second["embedding"].pop("backend")) == ("pgas", "torchrec")
    assert first == second
    saves_nothing = {"resume": "never", "every": 0, "last": False, "delta_every": 0}
    assert first["checkpoint"] == config.as_dict()["checkpoint"] | saves_nothing
    assert first["train"] == config.as_dict()["train"]


def test_the_reference_is_trained_again_for_its_noise(tmp_path: Path) -> None:
    configs = run_configs(_config(tmp_path), ["torchrec", "pgas"], noise_runs=2)
    assert list(configs) == ["torchrec", "torchrec_again", "torchrec_again_2", "pgas"]
    assert [config.embedding.backend for config in configs.values()] == ["torchrec"] * 3 + ["pgas"]
    assert [config.folder for config in configs.values()] == [tmp_path / name for name in configs]


def _drifting(share: float) -> dict[int, float | None]:
    """Return losses that drift away from a constant, by up to `share` of it."""
    return {step: 0.5 * (1 + share * min(1.0, 10 ** (step / 100 - 2))) for step in range(20, 401, 20)}


def test_differences_within_the_references_own_noise_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reference's runs differ by 1e-3, so 4e-3 may be noise; a gradient that is wrong from the start is not."""
    losses = {"torchrec": _drifting(0.0), "torchrec_again": _drifting(1e-3), "torchrec_again_2": _drifting(-1e-3)}
    losses |= {"pgas": _drifting(4e-3), "fused": dict.fromkeys(_drifting(0.0), 0.505)}
    folders = {name: _run(tmp_path / name, each, 5.0 if name == "pgas" else 10.0) for name, each in losses.items()}
    (line,) = report(folders, 1e-4, tmp_path / "comparison.json", noise_runs=2)
    assert re.match(
        r"fused .* 20: loss 0\.505 against 0\.5, a relative difference of 1\.0e-02; .* 3 reference runs$", line
    )
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert list(comparison["backends"]) == ["torchrec", "pgas", "fused"]
    assert [result["speedup"] for result in comparison["backends"].values()] == [1.0, 2.0, None]
    assert comparison["noise"] == pytest.approx([1e-3, 1e-3])
    table = capsys.readouterr().out.splitlines()
    assert max(map(len, table)) <= 120
    assert table[1].endswith("1.00  reference (noise 1.0e-03)")
    assert "2.00  agree to " in table[2]
    assert table[3].endswith("-  DISAGREE")


def test_a_further_reference_run_that_is_not_finite_agrees_with_nothing(tmp_path: Path) -> None:
    losses = {"torchrec": {**REFERENCE}, "torchrec_again": {20: 0.5, 40: None}, "pgas": {**REFERENCE}}
    folders = {name: _run(tmp_path / name, each) for name, each in losses.items()}
    (folders["torchrec_again"] / "summary.json").unlink()
    comparison = compare_runs(folders, 1e-4, 1)
    assert [result["agree"] for result in comparison["backends"].values()] == [False, False]
    assert "DISAGREE" in str(comparison_rows(comparison))


class _Trainer:
    def __init__(self, config: Config, losses: dict[int, float | None]) -> None:
        self.folder, self.losses = config.folder, losses

    def fit(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        _run(self.folder, self.losses)
        if None in self.losses.values():
            (self.folder / "summary.json").unlink()
            raise NotFiniteError("step 40: the training loss is nan")

    def close(self) -> None:
        pass


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("broken", ["torchrec", "pgas"])
def test_a_backend_whose_loss_is_not_finite_does_not_end_the_comparison(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    losses = {"torchrec": {**REFERENCE}, "pgas": {**REFERENCE}, "fused": {**REFERENCE}} | {broken: {20: 0.5, 40: None}}
    with caplog.at_level("INFO", "dlrm_overlap"):
        folders = train_runs(
            run_configs(_config(tmp_path), list(losses)),
            lambda config: _Trainer(config, losses[config.embedding.backend]),  # type: ignore[return-value]
        )
    assert "backend fused" in caplog.messages
    assert f"backend {broken}: step 40: the training loss is nan" in caplog.messages
    comparison = compare_runs(folders, 1e-4)
    assert comparison["backends"][broken]["eval_auroc"] is None
    assert "step 40: loss nan" in comparison["backends"][broken]["fault"]
    assert comparison["backends"]["fused"]["agree"] is (broken != "torchrec")
    assert (comparison["device"], comparison["agree"]) == ("cpu", False)
    assert "DISAGREE" in str(comparison_rows(comparison))
