"""The rollout side of a node: leases in, trajectories out.

`node` is the way in. It wires the engines (`supervisor` fills each place with one after the other), the `proxy` before
them (`routing` decides, `engine_record` knows of each), the `scheduler`, and the episodes in `episode/`.
`engine` says what any engine does: `vllm/` has ours, `fake_engine` one for tests.
"""
