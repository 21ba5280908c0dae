"""What figures share: workload, contenders of the forward, agreement, clocks, limits."""
