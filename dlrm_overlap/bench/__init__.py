"""Measurements: `dlrm-overlap bench KIND` measures one figure and appends its rows to a CSV file.

`registry` lists the figures, and `request` has the options of each. A file of `figures/` holds a figure: its contenders
and its rows. Figures share `harness/`: the workload, clocks, limits, checks. `report/` draws the rows.
"""
