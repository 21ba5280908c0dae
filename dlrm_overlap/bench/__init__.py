"""Benchmarks: `dlrm-overlap bench KIND` measures one figure and appends its rows to a CSV file.

`options` lists the figures and their options. Each file of `figures/` holds a figure: its contenders and rows.
`harness/` has what figures share: workload, clocks, limits, checks. `rows` writes rows.
"""
