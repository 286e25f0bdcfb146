"""`flash simulate --faults`."""
