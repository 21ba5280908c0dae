"""DLRM training whose embedding exchange overlaps with the rest of the step."""
