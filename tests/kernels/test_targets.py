import re
from typing import Any

import pytest
import torch

from dlrm_overlap.embedding.backends.fused import SlicedForward
from dlrm_overlap.embedding.backends.pgas import ZeroCopyForward
from dlrm_overlap.kernels import launches
from dlrm_overlap.kernels.compiled import CompiledKernel
from dlrm_overlap.kernels.launches import Launch
from dlrm_overlap.kernels.target import compile_options
from tests.conftest import refuses
from tests.kernels import resources
from tests.kernels.compiling import run_without_interpreter
from tests.kernels.emulation import interpreted
from tests.kernels.resources import Row, differences, read_table
from tests.kernels.test_launches import _kernel

pytestmark = interpreted


def test_kernels_compile_and_need_what_the_table_says() -> None:
    run_without_interpreter("tests.kernels.resources", "--quick", "--targets", "sm_90")


@pytest.mark.slow
def test_every_specialisation_compiles_and_needs_what_the_table_says() -> None:
    run_without_interpreter("tests.kernels.resources", "--targets", "sm_90")  # all targets: .ci/nightly


def _row(**cells: str) -> Row:
    row = {"kernel": "flags._wait num_warps=1", "constants": "BLOCK=4", "types": "*i64 i32"}
    return row | dict.fromkeys(resources.TARGETS, "32/0/128") | cells


def test_the_kernel_that_grew_is_named_with_the_difference() -> None:
    found = list(differences([_row(sm_90="40/4/128", gfx942="30/0/128")], [_row()], is_whole=True))
    assert found == [
        "sm_90, registers grew from 32 to 40, by 8, spills grew from 0 to 4, by 4: "
        "flags._wait num_warps=1 | BLOCK=4 | *i64 i32",
        "gfx942, registers fell from 32 to 30, by 2: flags._wait num_warps=1 | BLOCK=4 | *i64 i32",
    ]


def test_rows_that_only_one_side_has_are_named() -> None:
    other = _row() | {"constants": "BLOCK=8"}
    assert list(differences([_row()], [_row(), other], is_whole=False)) == []
    (found,) = differences([_row()], [_row(), other], is_whole=True)
    assert found == "launched no more: flags._wait num_warps=1 | BLOCK=8 | *i64 i32"
    (found,) = differences([_row(), other], [_row()], is_whole=True)
    assert found == "not in the table: flags._wait num_warps=1 | BLOCK=8 | *i64 i32"


def test_the_table_has_a_cell_for_every_target_but_for_products_by_tma() -> None:
    for row in read_table():
        for target in resources.TARGETS:
            is_launched = not row["kernel"].startswith("gemm.tiles") or target in ("sm_90", "sm_100")
            assert bool(re.fullmatch(r"\d+/\d+/\d+", row[target])) == is_launched, row


def test_an_amd_program_has_as_many_threads() -> None:
    for_nvidia = {"num_warps": 32, "maxnreg": 64, "num_stages": 3}
    assert compile_options(for_nvidia, on_amd=False) == for_nvidia
    assert compile_options(for_nvidia, on_amd=True) == {"num_warps": 16, "num_stages": 3}
    assert compile_options({"num_warps": 1}, on_amd=True) == {"num_warps": 1}


def test_fused_is_refused_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    unread: Any = None
    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(ZeroCopyForward, "__init__", lambda *_: None)
    with refuses("fused on AMD GPUs, .* take pgas"):
        SlicedForward(unread, unread, unread)


def test_triton_launches_on_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[Any, ...]] = []
    compiled: list[tuple[Any, ...]] = []
    monkeypatch.setattr(launches, "INTERPRETED", False)
    monkeypatch.setattr(launches, "ON_AMD", True)
    monkeypatch.setattr(launches, "_driver", lambda: pytest.fail("libcuda is asked"))
    monkeypatch.setattr(CompiledKernel, "compiled", lambda _, *arguments: compiled.append(arguments))
    monkeypatch.setattr(CompiledKernel, "__call__", lambda _, *arguments: launched.append(arguments))
    into, values = torch.zeros(4), torch.zeros(4)
    launch = Launch(_kernel(), 3, (), (into, values, 10, 0.5, 0), changing=("values", "epoch"))
    assert len(compiled) == 1, "before a capture"
    launch(values, 7)
    ((programs, _, *arguments),) = launched
    assert (programs, arguments[1] is values, arguments[2:]) == (3, True, [10, 0.5, 7])
