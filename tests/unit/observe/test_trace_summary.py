"""What a GPU's trace shows, on traces whose times are known."""

import copy
import csv
import gzip
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from dlrm_overlap.config import InputError
from dlrm_overlap.observe.trace_summary import GpuWork, Span, shares, summarise
from tests.conftest import refuses


def _event(name: str, begin: float, end: float, cat: str = "kernel", stream: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}


# Two steps, us: dense work overlaps the second half of the push and the first of the update; the GPU idles for 100 us.
STEPS = [
    _event("ProfilerStep#0", 0, 900, "user_annotation", 0),
    _event("ProfilerStep#1", 900, 2000, "user_annotation", 0),
    _event("aten::linear", 0, 5000, "cpu_op", 0),
    _event("_store_pooled", 1000, 1200),
    _event("Memcpy HtoD (Pinned -> Device)", 1100, 1250, "gpu_memcpy", 9),
    _event("_push_gradients", 1350, 1550, stream=20),
    _event("ampere_sgemm_128x64", 1450, 1650),
    _event("sm90_xmma_gemm", 1500, 1700, stream=8),
    _event("_update_rows", 1600, 2000, stream=21),
]


def _write(path: Path, events: list[dict[str, Any]]) -> Path:
    data = json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_each_kind_of_work_is_listed_with_what_runs_alone(tmp_path: Path, name: str) -> None:
    path = _write(tmp_path / name, STEPS)
    headline, *lines, exposed = summarise(path).splitlines()
    assert headline == f"{path}: 2 steps of 0.500 ms, the GPU idle in 0.050 of them"
    assert [line.split() for line in lines] == [
        ["work", "ms", "a", "step", "alone"],
        ["lookup", "0.100", "0.050"],
        ["exchange", "0.100", "0.050"],
        ["update", "0.200", "0.150"],
        ["copies", "0.075", "0.025"],
        ["products", "0.125", "0.025"],
    ]
    assert exposed == (
        "exposed communication: 0.050 ms a step, 10.0%; at most 0.150 ms, 30.0%, if kernels that look up and store "
        "count as communication"
    )


def test_work_of_the_step_before_does_not_count(tmp_path: Path) -> None:
    """The host is ahead: when the first traced step is launched, as one graph, the GPU still runs the step before."""

    def launched(event: dict[str, Any], call: int) -> dict[str, Any]:
        return event | {"args": event["args"] | {"correlation": call}}

    steps = [event if "stream" not in event["args"] or event["ts"] < 1000 else launched(event, 2) for event in STEPS]
    before = [launched(_event("sm90_xmma_gemm", 0, 950), 1), launched(_event("Memset", 950, 960, "gpu_memset"), 1)]
    launch = launched(_event("cudaGraphLaunch", 10, 20, "cuda_runtime"), 2)
    traces = {"a.json": STEPS, "b.json": [*before, *steps, launch]}
    paths = [_write(tmp_path / name, events) for name, events in traces.items()]
    alone, after = (summarise(path).replace(str(path), "") for path in paths)
    assert alone == after


APPLY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<"
KERNELS = {
    "lookup": [
        "void split_embedding_codegen_forward_unweighted_v2_kernel<float, float, float, long>(...)",
        *("_store_pooled", "_put_slices", "_put_pooled", "_add_partials", "_expand_rows"),
    ],
    "exchange": [
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        *("_push_gradients", "_put_columns", "_store_rows", "_signal_flags", "_wait_for_flags", "_begin_call"),
        *("_send_signal", "_wait_message"),
    ],
    "update": [
        "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_warp_per_row_1<float>",
        *("_update_rows", "_mark_rows"),
    ],
    "all-reduce": [
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        *("_average_share", "_update_share", "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"),
    ],
    "sort": ["void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>", "_cut_runs", "_place_gradients"],
    "ids": [
        *("_pull_ids", "_locate_ids", "_divide_ids", "_store_words", "_count_bags"),
        *("_look_up", "_count", "_list", "_take", "_replace"),  # slots of a cache
        *("_find", "_claim", "_evict", "_insert", "_sight", "_halve", "_fill_rows"),  # rows of any id
    ],
    "samples": ["_draw_ids", "_draw_features", "_draw_labels", "_unpack_records"],
    "copies": ["Memset (Device)", "memcpy128", f"{APPLY}..., CopyFunctor<...>>", "_swap_rows"],
    "optimizer": [f"{APPLY}...>", "_begin_update", "_update_parameters"],
    "products": ["nvjet_sm90_tst_192x192_64x3_1x2_h_bz_coopB_NNN", "tile_product", "_sum_parts"],
    "dense": [
        *("triton_poi_fused__to_copy_add_mul_14", "void at::native::vectorized_elementwise_kernel<4, ...>"),
        *("_add_layer", "_gradient_of_layer", "_interact", "_gradient_of_interaction", "_mlp", "_gradient_of_mlp"),
        *("_logits", "_gradient_of_logits", "_mask_and_sum"),
    ],
}


def test_kernels_are_known_by_name() -> None:
    assert {kind: [GpuWork(name, 7, Span(0, 1)).kind for name in names] for kind, names in KERNELS.items()} == {
        kind: [kind] * len(names) for kind, names in KERNELS.items()
    }


def test_each_of_our_kernels_has_a_kind() -> None:
    with Path("tests/kernels/resources.csv").open(newline="") as file:
        ours = {row["kernel"].split()[0].rpartition(".")[2] for row in csv.DictReader(file)}
    assert ours - {name for names in KERNELS.values() for name in names} == set(), "add each to KERNELS, as what it is"


def test_messages_between_nodes_are_communication() -> None:
    work = {name: GpuWork(name, 7, Span(0, 1)) for names in KERNELS.values() for name in names}
    assert {name for name, each in work.items() if each.waits and name.startswith("_")} == {
        "_wait_for_flags",
        "_wait_message",
    }
    assert {name for name, each in work.items() if each.stores} == {"_store_pooled", "_put_slices", "_put_pooled"}
    names = ("compute", "exposed", "copying", "idle", "exposed_most")
    found = shares([work["_put_pooled"], work["_wait_message"]._replace(span=Span(1, 9))])
    assert found == dict(zip(names, (1, 8, 0, 0, 9), strict=True))


def test_a_window_is_shared_among_computing_exposed_communication_copies_and_nothing() -> None:
    """A lookup that puts, 0 .. 10, with a product from 6 to 8; a wait to 14; a copy 12 .. 16; ids pulled 20 .. 24."""
    names = {
        "_put_slices": (0, 10),
        "sm90_gemm": (6, 8),
        "_wait_for_flags": (8, 14),
        "Memcpy HtoD": (12, 16),
        "_pull_ids": (20, 24),
    }
    work = [GpuWork(name, stream, Span(*span)) for stream, (name, span) in enumerate(names.items())]
    names = ("compute", "exposed", "copying", "idle", "exposed_most")
    assert list(shares(work, Span(0, 25)).items()) == list(zip(names, (10, 8, 2, 5, 16), strict=True))
    assert list(shares(work, Span(7, 21)).values()) == [3, 5, 2, 4, 7]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "No such file or directory; give a file that log.trace_steps wrote"),
        (b"{", "not a complete Chrome trace"),
        (b"[]", "not a complete Chrome trace"),
        (json.dumps({"traceEvents": [STEPS[2]]}).encode(), "nothing in it ran on a GPU"),
    ],
)
def test_what_is_no_trace_of_a_gpu_is_refused(tmp_path: Path, data: bytes | None, message: str) -> None:
    path = tmp_path / "trace.json"
    if data is not None:
        path.write_bytes(data)
    with refuses(message):
        summarise(path)


def test_wrong_values_in_a_trace_are_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    wrong: list[Any] = [None, True, -1, math.inf, math.nan, "x", [], {}, [[]], 10**400]
    events = [event for event in STEPS if event["ph"] == "X"]
    contents: list[Any] = [wrong, 3, {"a": 1}, [events]]
    for number in (0, 2, 3, 4):  # one of each category
        for key in (*events[number], "args.stream", "args.correlation", "new"):
            section, _, name = key.rpartition(".")
            for value in [*wrong, *[...] * (key in events[number])]:
                contents.append(changed := copy.deepcopy(events))
                target = changed[number][section] if section else changed[number]
                target[name] = value
                if value is ...:
                    del target[name]
    for text in [*(json.dumps({"traceEvents": content}) for content in contents), "[" * 100_000]:
        path.write_text(text)
        try:
            assert "\n" in summarise(path)
        except InputError as error:
            refusal = str(error)
            assert "\n" not in refusal
    path.unlink()
    os.mkfifo(path)
    with refuses("it is a pipe, not a file"):
        summarise(path)
