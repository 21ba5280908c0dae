"""Measurements: `dlrm-overlap bench KIND` measures one figure and appends its rows to a CSV file.

`registry` lists the figures; `request` and the files named after it hold the options that each of them takes. The three
folders build on each other: a figure in `figures/` says what is measured and who takes part, `report/` turns what was
measured into rows of a CSV file and a printed table, and `harness/` holds what figures share: the workload, the
contenders, the clocks.
"""
