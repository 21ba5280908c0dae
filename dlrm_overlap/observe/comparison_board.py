"""A comparison in TensorBoard: one page of charts with a curve a run, and the table of the speedups.

The runs write the same tags in sibling folders, so TensorBoard draws their curves over each other. What only a
comparison knows is added here: each run's difference from the reference's losses in the run's own folder, the layout of
the page Custom Scalars and the table, as Markdown, in a folder of the comparison's own.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_overlap.launching.text_table import markdown_table
from dlrm_overlap.observe.agreement import Losses
from dlrm_overlap.observe.breakdown import breakdown_markdown, draw_breakdown
from dlrm_overlap.observe.tensorboard import TensorBoard

DIFFERENCE = "compare/loss_difference"
_EXPOSED = "exposed communication, ms a traced step"
LAYOUT: Mapping[str, Sequence[str | list[str]]] = {
    "step time, ms: median, and the band p10 to p90 of the logged steps": [
        "Margin",
        ["speed/step_ms_p50", "speed/step_ms_p10", "speed/step_ms_p90"],
    ],
    _EXPOSED: ["Multiline", ["speed/exposed_ms"]],
    "training loss": ["Multiline", ["train/loss"]],
    "training loss, relative difference from the reference": ["Multiline", [DIFFERENCE]],
    "samples a second": ["Multiline", ["speed/samples_per_s"]],
}
CPU_NOTE = "On CPUs plain PyTorch stands in for the kernels of pgas and fused: take speedups from GPUs."
_TURNS = (
    "The backends took turns of {} steps, so what slowed the host for longer than that slowed all of them; the "
    "interval is a bootstrap over segments of their steps, the same ones of both."
)
_ORDER = (
    "Each run was trained after the one before it, so what changed on the host between two runs is in their ratio; the "
    "interval is a bootstrap over segments of each run's steps, and holds the noise within the runs alone."
)


def write_board(
    place: Path, folders: Mapping[str, Path], losses: Mapping[str, Losses], comparison: Mapping[str, Any]
) -> None:
    """Write what a comparison adds to TensorBoard, in place of an earlier comparison's.

    Args:
        place: the comparison's own folder, beside those of the runs.
        folders: run -> its folder, the reference first.
        losses: run -> its logged training losses.
        comparison: what `comparison.compare_runs` has returned.
    """
    reference = losses[comparison["reference"]]
    for name, folder in folders.items():
        board = TensorBoard(folder, start_step=None)
        for step, loss in losses[name].items():
            if reference.get(step):
                board.scalars({DIFFERENCE: loss / reference[step] - 1}, step)
        board.close()
    board = TensorBoard(place, start_step=0)
    parts = {name: each["breakdown_ms"] for name, each in comparison["backends"].items() if each["breakdown_ms"]}
    board.layout({title: chart for title, chart in LAYOUT.items() if parts or title != _EXPOSED})
    order = _TURNS.format(turn) if (turn := comparison["interleave"]) else _ORDER
    notes = [order, CPU_NOTE] if comparison["device"] == "cpu" else [order]
    board.text("comparison", "\n\n".join([*_answers(comparison), comparison_markdown(comparison), *notes]))
    if parts:
        board.text("breakdown", breakdown_markdown(parts))
        board.image("breakdown", draw_breakdown(parts))
    board.close()


def _answers(comparison: Mapping[str, Any]) -> list[str]:
    """Return of each backend how many times as fast as the reference a step is, as Markdown."""
    reference = comparison["reference"]
    reference_ms = comparison["backends"][reference]["step_ms_p50"]
    return [
        f"**{name}: a step is {result['speedup']:.2f} times as fast as with {reference}**, "
        f"{_digits(result['step_ms_p50'])} ms instead of {_digits(reference_ms)} in the median."
        for name, result in comparison["backends"].items()
        if name != reference and result["speedup"] is not None
    ]


def comparison_markdown(comparison: Mapping[str, Any]) -> str:
    """Return the backends as a Markdown table: step times, speedup with its 95% interval, whether losses agree.

    Further runs of the reference come last: their ratios show how far two runs of the same thing are apart.
    """
    head = ["backend", "step p50, ms", "p95, ms", "speedup", "95% interval", "samples/s", "losses"]
    lines = [head]
    for name, result in comparison["backends"].items():
        interval = result["speedup_interval"]
        lines.append(
            [
                name,
                *(_digits(result[key]) for key in ("step_ms_p50", "step_ms_p95")),
                _digits(result["speedup"], ".2f"),
                f"{interval[0]:.2f} to {interval[1]:.2f}" if interval else "-",
                _digits(result["samples_per_s"], ",.0f"),
                ("reference" if name == comparison["reference"] else "agree") if result["agree"] else "DISAGREE",
            ]
        )
    reference_ms = comparison["backends"][comparison["reference"]]["step_ms_p50"]
    for name, run in comparison["noise"]["runs"].items() if comparison["noise"] else ():
        ratio = reference_ms / run["step_ms_p50"] if reference_ms and run["step_ms_p50"] else None
        lines.append([name, _digits(run["step_ms_p50"]), "-", _digits(ratio, ".2f"), "-", "-", "the reference again"])
    return markdown_table(lines)


def _digits(value: float | None, spec: str = ".4g") -> str:
    return "-" if value is None else format(value, spec)
