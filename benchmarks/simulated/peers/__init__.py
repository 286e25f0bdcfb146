"""Policies of other systems, small, on the same simulated engines, workload and clock as ours.

Each is re-implemented from its published rules; what is left out favours the peer: no message costs, no start-up, no
failure but those the workload asks for.
"""
