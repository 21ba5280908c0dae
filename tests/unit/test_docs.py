"""The pages agree with what they speak of: links, names of code, keys, backends, measured rows."""

import dataclasses
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
import yaml
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from dlrm_overlap import backends
from dlrm_overlap.bench.options import FIGURES
from dlrm_overlap.config import Config
from dlrm_overlap.launching.parsing import Parser, meanings_of, parse_config
from tests import keys
from tests.agreement import assert_same
from tests.conftest import read_rows, read_table
from tests.distributed.tiny_stage import Stage
from tests.programs import two_lines

PAGES = [Path("README.md"), Path("CONTRIBUTING.md"), Path("CHANGELOG.md"), *sorted(Path("docs").rglob("*.md"))]
PAGES += [page for folder in ("launch", "kernels") for page in Path(folder).glob("*.md")]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=str)
CHAPTERS = sorted(Path("docs/architecture").glob("*.md"))
ROOTS = (Path("."), Path("dlrm_overlap"))  # where the paths begin that a page names
_MADE_BY_RUNS = {"runs", "build", "dist"}
_SECTIONS: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Config)}
_FOLDERS = "|".join({f.name for root in ROOTS for f in root.iterdir() if f.is_dir()} - _MADE_BY_RUNS)


def _anchors(page: Path) -> list[str]:
    """Return the anchors of a page's headings, in their order, as GitHub makes them where no title is there twice."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"\]\([^)]*\)", "", title) for title in titles]
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain]


def test_the_page_of_keys_has_every_key_and_no_other() -> None:
    page = keys.PAGE.read_text()
    assert keys.rows()[-1] in page
    assert page == keys.with_table(page), "run `python -m tests.keys`"


@EVERY_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page} links to {path}"
        assert not anchor or anchor in _anchors(target), f"{page} links to {link}"


@EVERY_PAGE
def test_files_and_modules_that_a_page_names_are_there(page: Path) -> None:
    _check_names(page, page.read_text())


def test_every_test_that_the_page_of_faults_names_is_there() -> None:
    files = {path: path.read_text() for path in Path("tests").rglob("test_*.py")}
    named = re.findall(r"`(?:tests/[\w/]+/)?(test_\w+\.py)(?:::(\w+))?`", Path("docs/reliability.md").read_text())
    assert named
    for file, test in named:
        found = [text for path, text in files.items() if path.name == file]
        assert any(f"def {test}(" in text if test else text for text in found), f"{file}::{test}"


def _check_names(page: Path, text: str) -> None:
    """Check that the files, modules, classes and functions that `text`, of `page`, names are there."""
    for path in re.findall(rf"`((?:{_FOLDERS})/[\w/]*(?:\.\w+)?)`", text):
        assert any((root / path).exists() for root in ROOTS), f"{page} names {path}"
    for name in re.findall(r"\b(dlrm_overlap(?:\.\w+)+)", text):
        module, attributes = Path(), []
        for part in name.split("."):
            if (module / part).is_dir() or (module / f"{part}.py").exists():
                module /= part
            else:
                attributes.append(part)
        source = module.with_suffix(".py") if not module.is_dir() else module / "__init__.py"
        assert len(attributes) <= 1, f"{page} names {name}"
        assert all(re.search(rf"^(?:class|def) {a}\b|^{a}\b.* =", source.read_text(), re.M) for a in attributes), name


@EVERY_PAGE
def test_what_the_programs_of_a_page_import_is_there(page: Path) -> None:
    for program in re.findall(r"^```python\n(.*?)```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in re.findall(r"^from dlrm_overlap.*", program, re.MULTILINE):
            exec(line, {})


def test_each_training_of_the_pages_has_a_folder_of_its_own() -> None:
    """A reader runs the commands in order, and a run in the folder of a finished one trains nothing."""

    def add_options(parser: Parser) -> None:
        parser.add_argument("--nproc", type=int | Literal["auto"])

    folders = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", "")
        for command in re.findall(r"^ *dlrm-overlap train (.*--config.*|.*--data\.path.*)$", text, re.MULTILINE):
            config, _ = parse_config(Config, "train", "", shlex.split(command, comments=True), add_options)
            folders.append(config.folder)
    assert len(folders) >= 10
    assert len(folders) == len({*folders}), folders


def test_readme_names_the_backends_of_the_registry() -> None:
    assert [row[0] for row in read_table("README.md", "| backend |")] == [f"`{name}`" for name in backends.BACKENDS]


def test_the_page_of_kernels_names_every_file() -> None:
    folder = Path("kernels")
    named = set(re.findall(r"\]\(([\w/]+\.py)\)", (folder / "README.md").read_text()))
    assert {str(path.relative_to(folder)) for path in folder.rglob("*.py") if path.name != "__init__.py"} <= named


def test_the_page_of_figures_has_a_command_of_every_kind() -> None:
    named = set(re.findall(r"\bbench (\w+)", Path("docs/results/figures.md").read_text()))
    assert set(FIGURES) <= named, "a figure without a line"


def test_the_default_put_is_as_fast_as_the_other() -> None:
    """`embedding.put: direct` is at most 3% slower than stores of slices, on every shape that was measured."""
    paths = [*Path("docs/results").glob("four_h200/stage_*.csv")]
    assert len(paths) == 5
    for path in paths:
        medians = {row["contender"]: float(row["median_ms"]) for row in read_rows(path)}
        assert medians["fused"] <= 1.03 * medians["fused_stores"], path


_CODE = ("dlrm_overlap", "kernels", "data", "tests", "configs")


def test_the_citation_is_of_the_package() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    citation = yaml.safe_load(Path("CITATION.cff").read_text())
    for key in ("version", "authors", "keywords"):
        assert citation[key] == project[key]


@pytest.mark.parametrize("page", [Path("docs/architecture.md"), *CHAPTERS], ids=str)
def test_files_and_keys_that_the_chapters_name_are_there(page: Path) -> None:
    fields = {prefix: set(meanings_of(section)) for prefix, section in _SECTIONS.items()}
    files = ["pyproject.toml"]
    files += [str(path) for folder in (*_CODE, "docs", "launch") for path in Path(folder).rglob("*.*")]
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for name in re.findall(r"`([^`]+)`", text):
        if re.fullmatch(r"[\w./-]+\.(py|yaml|csv|md|toml)", name):
            assert any(f"/{file}".endswith(f"/{name}") for file in files), f"{page} names {name}"
            continue
        section, _, key = name.partition(":")[0].partition(".")
        if section in fields and re.fullmatch(r"\w+", key) and key != "json":  # checkpoint.json is a file of runs
            assert key in fields[section], f"{page} names the key {name}"


def test_the_table_of_packages_is_the_one_that_is_checked() -> None:
    contracts = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.replace("dlrm_overlap.", "").split(" | ") for layer in contracts[0]["layers"]]
    rows = read_table("docs/architecture.md", "| package of `dlrm_overlap` |")
    assert [sorted(re.findall(r"`([\w.]+)`", row[0])) for row in rows] == [sorted(layer) for layer in layers]


def test_the_tests_that_the_table_of_captured_steps_names_are_there() -> None:
    table = Path("docs/torchrec.md").read_text().partition("| captured steps |")[2].partition("\n\n")[0]
    sources = "".join(path.read_text() for path in Path("tests").rglob("*.py"))
    lines = [line.split("|")[3] for line in table.splitlines()[2:]]
    for test, case in re.findall(r"`(\w+)(?:\[([^]]*)\])?`", "".join(lines)):
        program = f'"{test}": Program(' in sources or f'PROGRAMS["{test}"]' in sources or test in two_lines.PROGRAMS
        assert f"def {test}(" in sources or program, test
        assert f'"{case}": ' in sources or not case, case
    assert sum("`" in line for line in lines) >= 14


def test_the_two_lines_of_the_page_train(world_of_one: dist.ProcessGroup, caplog: pytest.LogCaptureFixture) -> None:
    page = Path("docs/torchrec.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert sum(bool(line) for block in blocks for line in block.splitlines()) == 5, "a stranger needs two lines"
    imports, sharder, pipeline = filter(None, blocks[0].splitlines())
    torch.manual_seed(0)
    example = runpy.run_path("examples/own_model.py")
    device = torch.device("cpu")
    towers = example["TwoTowers"](device)
    names: dict[str, Any] = {"device": device, "fused_params": {"learning_rate": 0.1}}
    with caplog.at_level("WARNING", "dlrm_overlap"):
        exec(f"{imports}\n{sharder}", names)
        tables = {f"t_{name}": table_wise(0, compute_kernel="fused") for name in example["ROWS"]}
        sharding = construct_module_sharding_plan(towers.embedding, tables, names["sharders"][0], 1, 1, "cpu")
        plan = ShardingPlan({"embedding": sharding})
        model = DistributedModelParallel(towers, device=device, plan=plan, sharders=names["sharders"])
        dense = dict(in_backward_optimizer_filter(model.named_parameters()))
        adagrad = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.03))
        names |= {"model": model, "optimizer": CombinedOptimizer([model.fused_optimizer, ("dense", adagrad)])}
        exec(pipeline, names)
        batches = example["synthetic_batches"](15, rank=0)
        loss = [names["pipeline"].progress(batches).item() for _ in range(15)][-1]
        names["pipeline"].close()
    warnings = [each for each in caplog.records if each.name == "dlrm_overlap" and each.levelname == "WARNING"]
    assert not warnings, "nothing should fall back"
    assert loss < 0.65, f"it learns: the first loss is near log 2, the last is {loss:.3f}"


def test_the_example_of_a_backend_runs(world_of_one: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path("docs/adding_a_backend.md").read_text()
    source, entry = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    example = ModuleType("gathered")
    exec(compile(source, "adding_a_backend.md", "exec"), example.__dict__)
    monkeypatch.setitem(sys.modules, "dlrm_overlap.embedding.backends.gathered", example)
    for name, backend in eval(f"{{{entry}}}", dict(vars(backends))).items():
        monkeypatch.setitem(backends.BACKENDS, name, backend)
    stage = Stage([([8, 4], [4])], rank=0)
    exchange = stage.exchange(world_of_one, "gathered")
    inputs, expected = stage.inputs(0, (5,))
    assert_same(exchange.start(inputs, (5,)).wait().detach(), expected, "the pooled embeddings")
    exchange.close()
