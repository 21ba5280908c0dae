"""The plot of `bench volume`: bytes on the links over time, a panel a contender."""

from typing import Any

from dlrm_overlap.bench.report.measured import Measured, Row, Table, cells, need
from dlrm_overlap.bench.report.style import EDGE, LIMIT, Picture, looks


def _by_contender(measured: Measured) -> dict[str, list[Row]]:
    """Return contender -> its rows, of one that was measured twice the last."""
    found: dict[str, list[Row]] = {}
    for row in measured.rows:
        if need(row, "begin_us") == 0.0:
            found[row["contender"]] = []
        found[row["contender"]].append(row)
    return found


def draw_volume(measured: Measured) -> Picture:
    """Draw the rate of each contender over time, the rate of the links, and where the stage ends."""
    found = _by_contender(measured)
    picture = Picture(measured.name, 0.9 + 1.0 * len(found))
    panels = picture.panels(1, len(found))
    shown = looks(found)
    longest = max(need(rows[0], "stage_us") for rows in found.values())
    top = max(need(row, column) for row in measured.rows for column in ("gb_per_s", "link_gb_per_s"))
    for axes, (name, rows) in zip(panels, found.items(), strict=True):
        begins = [need(row, "begin_us") for row in rows]
        widths = [need(row, "end_us") - begin for row, begin in zip(rows, begins, strict=True)]
        rates = [need(row, "gb_per_s") for row in rows]
        axes.bar(begins, rates, widths, align="edge", color=shown[name].colour, **EDGE)
        end = need(rows[0], "stage_us")
        axes.axvline(end, color="black", ls="--", lw=1, label="end of the stage")
        axes.axhline(need(rows[0], "link_gb_per_s"), label="rate of the links, measured", **LIMIT)
        axes.set_xlim(0, longest * 1.02)
        axes.set_ylim(0, top * 1.1)
        axes.set_title(f"{name}: {end:.0f} us", loc="left", fontsize=8)
        axes.set_ylabel("GB/s")
    panels[-1].set_xlabel("us since the stage began on rank 0")
    picture.legend(panels[0])
    return picture


def volume_table(measured: Measured) -> Table:
    """Return for each contender how long its stage is, for how much of it links are busy, and how busy at most."""
    lines: list[list[Any]] = [
        ["contender", "stage, us", "sends within, us", "bytes to peers, MB", "greatest rate, GB/s", "links can, GB/s"]
    ]
    for name, rows in _by_contender(measured).items():
        busy = sum(need(row, "end_us") - need(row, "begin_us") for row in rows if need(row, "bytes"))
        sent = sum(need(row, "bytes") for row in rows) / 1e6
        most = max(need(row, "gb_per_s") for row in rows)
        lines.append([name, need(rows[0], "stage_us"), busy, sent, most, need(rows[0], "link_gb_per_s")])
    return cells(lines)
