"""The rollout side of a node: takes leases from the hub, plays episodes with the engines, and delivers trajectories.

`node` makes and connects all parts. A sample passes them in this order: `scheduler` (takes a lease, which assigns a
task to this node, from the hub) → `episode/` (plays the episode of the lease) → `proxy` (sends a `ResponseRequest` to
the engine that `routing` chooses) → `engine` (`vllm/` has the real one, `fake_engine` one for tests) → `scheduler`
(delivers the result). Beside these, `supervisor` keeps the places of the node filled with engines on the newest
version, and `reports` reports their state to the hub.
"""
