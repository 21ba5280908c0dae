"""Benchmarks: `dlrm-overlap bench KIND` measures a figure and appends rows to a CSV file (docs/results/figures.md)."""
