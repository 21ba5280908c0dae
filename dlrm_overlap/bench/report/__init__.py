"""Rows of a CSV file: written, read again and drawn."""
