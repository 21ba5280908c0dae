"""The tables of `docs/results` on the embedding stage, the backward and overlapped pairs are those of their rows."""

import re
import subprocess
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from dlrm_overlap.bench.report.concurrent import CLASSES, summarise
from dlrm_overlap.bench.report.measured import shape
from tests.conftest import read_rows, read_table
from tests.published import Row, ms_of, read, runs_of

STEP, STAGE, BACKWARD, CONCURRENT = (f"docs/results/{n}.md" for n in ("step", "stage", "backward", "concurrent"))
Expected = Iterable[Sequence[float | None]]
"""the numbers of each line of a table, in order; None for what is text, or has no row"""


def _steps() -> Expected:
    found = [run for run in runs_of("step") if run["torchrec"]["pinned_host"] == "False"]
    for run, aimed_at in zip(found, ((3.5, 2, 3), (2.5, 1.7, 5.5), (6, 3, 1.2), (8, 0.6)), strict=True):
        *theirs, ours = [ms_of(run[n]) for n in ("torchrec", "torchrec_strongest", "pgas_graph") if n in run]
        yield [*theirs, ours, *(ms / ours for ms in theirs), *aimed_at]


def _strategies_of_a_step() -> Expected:
    first, twice = runs_of("strategies")
    for name, row in first.items():
        yield [ms_of(row), *(ms_of(twice[name]) for _ in range(name in twice))]


def _shapes() -> Expected:
    for run in runs_of("stage"):
        ms = {name: ms_of(row) for name, row in run.items()}
        limit = float(run["baseline"]["limit_ms"])
        yield [*ms.values(), limit, 100 * limit / ms["pgas"], ms["baseline"] / ms["pgas"], ms["torchrec"] / ms["pgas"]]


def _scaling(*names: str) -> Expected:
    for name in names:
        for run in runs_of(name):
            ms = {each: ms_of(row) for each, row in run.items()}
            limit = float(run["baseline"]["limit_ms"])
            four = [ms[each] for each in ("baseline", "torchrec", "pgas", "fused")]
            ranks = float(run["baseline"]["world_size"])
            yield [ranks, *four, limit, 100 * limit / ms["pgas"], ms["baseline"] / ms["pgas"]]


_BASELINES = ("baseline", "torchrec", "nccl_chunked")


def _baselines_parts() -> Expected:
    for name in ("weak_two_gpus", "strong_two_gpus"):
        row = runs_of(name)[-1]["baseline"]
        yield [float(row[column]) for column in ("lookup_ms", "all_to_all_ms", "sync_ms", "unpack_ms")]


def _everyone(name: str) -> Expected:
    for run in runs_of(name):
        ms = {name: ms_of(row) for name, row in run.items()}
        chunked = min((name for name in ms if name.startswith("nccl_chunked")), key=lambda name: ms[name])
        limit = float(run["baseline"]["limit_ms"])
        strongest = min(time for name, time in ms.items() if name.startswith(_BASELINES))
        times = [ms[name] for name in ("torchrec", "nccl", "pgas", "fused")]
        own = [limit, 100 * limit / ms["pgas"], strongest / min(ms["pgas"], ms["fused"])]
        yield [ms["baseline"], ms[chunked], float(chunked.rsplit("_")[-1]), *times, *own]


def _beside_on_two() -> Expected:
    for run in runs_of("stage_two_gpus"):
        together = {name: float(row["together_ms"]) for name, row in run.items()}
        strongest = min(time for name, time in together.items() if name.startswith(_BASELINES))
        ours = [together[name] for name in ("pgas", "fused", "fused_stores", "fused_dma")]
        yield [float(run["baseline"]["product_ms"]), strongest, *ours]


def _puts() -> Expected:
    (run,) = runs_of("puts")
    for name in ("baseline", "nccl_chunked_4", "nccl", "pgas", "fused", "fused_stores", "fused_dma"):
        yield [ms_of(run[name]), float(run[name]["together_ms"])]


def _puts_on_two() -> Expected:
    for run in runs_of("stage_two_gpus"):
        ms = {name: ms_of(row) for name, row in run.items()}
        yield [ms["pgas"], ms["fused"], ms["fused"] / ms["pgas"], ms["fused_stores"], ms["fused_dma"]]


def _copies() -> Expected:
    for run in runs_of("stage_two_gpus"):
        lent, copied = ms_of(run["pgas"]), ms_of(run["pgas_copied"])
        size = int(run["pgas"]["global_batch"]) * int(run["pgas"]["tables"]) * int(run["pgas"]["dim"]) * 4
        yield [size / int(run["pgas"]["world_size"]) / 1e6, lent, copied, copied - lent]


def _registered() -> Expected:
    (run,) = runs_of("registered")
    chunks = [f"nccl_chunked_{count}" for count in (2, 4, 8)]
    for names in (["baseline"], chunks, ["nccl_registered_4"], ["nccl_copy_engines_4"], ["torchrec"]):
        ms = [ms_of(run[name]) for name in names]
        yield [*ms, *(each / ms_of(run["pgas"]) for each in ms)]


def _volume() -> Expected:
    rows = read("volume")
    for name in ("baseline", "nccl_chunked_2", "nccl_chunked_4", "nccl_chunked_8", "fused"):
        own = [row for row in rows if row["contender"] == name]
        stage_us = float(own[0]["stage_us"])
        busy_us = sum(float(row["end_us"]) - float(row["begin_us"]) for row in own if float(row["bytes"]))
        busy_us = min(stage_us, busy_us)  # the last bin ends later
        yield [stage_us, 100 * busy_us / stage_us, max(float(row["gb_per_s"]) for row in own)]


def _schedules() -> Expected:
    rows = {(row["contender"], row["schedule"]): row for row in read("schedule")}
    for name in ("pgas", "fused"):
        own = [rows[name, schedule] for schedule in ("linear", "remote_first", "balanced")]
        yield [ms_of(row) for row in own]
        yield [100 * float(row["skew_fraction"]) for row in own]


def _fused(name: str) -> Expected:
    yield [ms_of(row) for row in read(name) if row["contender"].startswith("fused")]


def _backward() -> Expected:
    rows = [row for row in read("backward") if row["zipf_alpha"] == "0.0" or row["multi_hot"].startswith("[")]
    baseline: Row = {}
    for row in rows:
        if row["contender"] == "baseline":
            baseline = row
        if row["contender"] == "push":
            limit, least = float(row["limit_ms"]), float(row["compulsory_ms"])
            times = [
                ms_of(baseline),
                ms_of(row),
                limit,
                100 * limit / ms_of(row),
                least,
                ms_of(baseline) / ms_of(row),
            ]
            exposed = rows[rows.index(row) + 1]
            assert exposed["contender"] == "push_exposed"
            yield [*times, float(row["prepare_ms"]), ms_of(exposed)]


def _hot_rows() -> Expected:
    rows = [row for row in read("backward") if row["optimizer"] == "sgd" and not row["multi_hot"].startswith("[")]
    found: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    for row in rows:
        shape = tuple(row[name] for name in ("tables", "dim", "multi_hot"))
        found.setdefault(shape, {})[row["contender"], row["zipf_alpha"]] = ms_of(row)
    for ms in found.values():
        yield [ms[name, alpha] for name in ("baseline", "push", "atomic") for alpha in ("0.0", "1.05")]


def _strategies(name: str) -> Expected:
    numbers = ("fraction_of_ideal", "speedup", "together_ms")
    rows = [{**row, **{column: float(row[column]) for column in numbers}} for row in read(name)]
    for line in summarise(rows):
        yield [line[column] for column in (*CLASSES, "all", "mean_speedup", "best")]


TABLES: list[tuple[str, str, Callable[[], Expected]]] = [
    (STEP, "| shape | `torchrec`", _steps),
    (STEP, "| | 8192 samples a GPU", _strategies_of_a_step),
    (STAGE, "| tables/GPU x rows x dim, global batch, ids a bag | baseline", _shapes),
    (STAGE, "| two GPUs, fp32 wire", lambda: _everyone("stage_two_gpus")),
    (STAGE, "| two GPUs, bf16 wire", lambda: _everyone("stage_two_gpus_bf16")),
    (STAGE, "| two GPUs, beside a product", _beside_on_two),
    (STAGE, "| | ranks | baseline", lambda: _scaling("weak", "strong")),
    (STAGE, "| two GPUs | ranks | baseline", lambda: _scaling("weak_two_gpus", "strong_two_gpus")),
    (STAGE, "| parts, ms |", _baselines_parts),
    (STAGE, "| contender | alone |", _puts),
    (STAGE, "| tables/GPU x rows x dim, global batch, ids a bag | `pgas` | in place", _puts_on_two),
    (STAGE, "| tables/GPU x rows x dim, global batch, ids a bag | output of a rank", _copies),
    (STAGE, "| contender | ms | `pgas`", _registered),
    (STAGE, "| contender | stage, us |", _volume),
    (STAGE, "| | linear |", _schedules),
    (STAGE, "| bags a slice |", lambda: _fused("slice")),
    (STAGE, "| bags a slice, two GPUs |", lambda: _fused("slice_two_gpus")),
    (STAGE, "| programs |", lambda: _fused("occupancy")),
    (STAGE, "| programs, 256 tables |", lambda: _fused("occupancy_many_tables")),
    (STAGE, "| bags a slice, 256 tables |", lambda: _fused("slice_many_tables")),
    (BACKWARD, "| tables/GPU x rows x dim, global batch, ids a bag | optimizer", _backward),
    (BACKWARD, "| | baseline, uniform |", _hot_rows),
    (CONCURRENT, "| strategy | G-long (51)", lambda: _strategies("concurrent")),
    (CONCURRENT, "| strategy | G-long (52)", lambda: _strategies("concurrent_repeated")),
]


@pytest.mark.parametrize(("page", "header", "expected"), TABLES, ids=[f"{page} {header}" for page, header, _ in TABLES])
def test_a_table_shows_its_rows(page: str, header: str, expected: Callable[[], Expected]) -> None:
    lines, values = read_table(page, header), list(expected())
    shapes = {shape(row).replace("\n", ", ") for name in ("stage", "backward") for row in read(name)}
    assert len(lines) == len(values)
    for cells, numbers in zip(lines, values, strict=True):
        shown = [text for cell in cells[1:] for text in re.findall(r"-?\d+(?:\.\d+)?(?=%|x| MB| ms|,|$| /)", cell)]
        assert len(shown) == len(numbers), cells
        assert cells[0] in shapes or not re.match(r"\d+ x .*, \d+, ", cells[0]), "a shape of other rows"
        for text, value in zip(shown, numbers, strict=True):
            _, _, decimals = text.partition(".")
            # Rows have four digits, which a ratio of two may show.
            assert value is None or abs(float(text) - value) <= 0.55 * 10 ** -len(decimals) + 1e-9, (cells, value)


_IN_README = ("stage.csv", "step.csv", "ablation.csv", "timeline.csv", "calibration/timeline.csv")


def _origin(rows: Sequence[Row]) -> str:
    """Return the pattern of the words that rows need beside their tables: none with a clean commit and a command."""
    commit = ", ".join(sorted({row.get("commit", "") for row in rows}))
    has_command = all(row.get("command") for row in rows)
    if commit and "-dirty" not in commit and has_command:
        return ""
    words = f"commit {commit}".replace("-dirty", " with uncommitted changes") if commit else "no commit"
    return rf"{words}, landed with (\w{{7}} on [\d-]{{10}}){'' if has_command else ', no command'}[.;]"


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout


def test_rows_without_a_clean_commit_or_a_command_say_so_beside_their_tables() -> None:
    folder, readme = Path("docs/results"), Path("README.md")
    texts = {page: " ".join(page.read_text().split()) for page in [readme, *folder.glob("*.md")]}
    figures = " ".join(Path("docs/figures.md").read_text().split())
    history = _git("rev-parse", "--is-shallow-repository") == "false\n"
    log = _git("log", "--format=%h on %cs", "--abbrev=7", "--name-only", "--", str(folder)) if history else ""
    for path in folder.rglob("*.csv"):
        name = path.relative_to(folder).as_posix()
        if name.startswith("simulated_") or not (origin := _origin(read_rows(path))):
            continue
        shown = [
            text for page, text in texts.items() if f"]({name})" in text or (page, name in _IN_README) == (readme, True)
        ]
        for text in shown or [figures]:
            found = re.search(rf"`{name}`(?:, `[\w/.]+`)*: {origin}", text)
            assert found, f"write beside the table of {name}: {origin}"
            assert not log or re.search(rf"^{found[1]}\n\n(?:docs.*\n)*{path}\n", log, re.MULTILINE), (
                f"{name}: {found[1]}"
            )
