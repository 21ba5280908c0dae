"""The embedding stage: plan, sharder, initial weights."""
