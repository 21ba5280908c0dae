"""Ids to the owners of their rows."""
