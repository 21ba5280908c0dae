"""Shared by the figures: workload, contenders of the forward, agreement, clocks, limits."""
