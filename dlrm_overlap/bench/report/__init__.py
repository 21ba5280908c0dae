"""Rows of a CSV file: written, read again, drawn, and put on one page."""
