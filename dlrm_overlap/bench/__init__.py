"""Measurements: `dlrm-overlap bench KIND` measures one figure and appends its rows to a CSV file.

`options` lists the figures with their options. A file of `figures/` holds a figure: its contenders and its rows.
Figures share `harness/`: the workload, clocks, limits, checks; and `rows`, which writes rows.
"""
