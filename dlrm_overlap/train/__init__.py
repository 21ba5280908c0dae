"""The run: what is put together, and how it trains, evaluates, compares and exports."""
