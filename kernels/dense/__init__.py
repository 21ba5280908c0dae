"""The kernel that updates the dense parameters, and its twin."""
