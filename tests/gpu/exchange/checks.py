"""All checks, in the order in which they run."""

from tests.gpu.exchange import faults, lookups, stress, training, windows

CHECKS = lookups.CHECKS | windows.CHECKS | stress.CHECKS | faults.CHECKS | training.CHECKS | faults.LOST_PEERS
