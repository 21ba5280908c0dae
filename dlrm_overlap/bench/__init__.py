"""Measurements: one file a figure."""
