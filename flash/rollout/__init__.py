"""The rollout side of a node: takes leases from the hub, plays episodes with the engines, and delivers trajectories.

`node` wires everything. A sample takes this road: `scheduler` (a lease starts an episode) → `episode/` (plays one
environment) → `proxy` (sends a `ResponseRequest` to the engine that `routing` chooses) → `engine` (`vllm/` has the
real one, `fake_engine` one for tests) → `hub_client` (delivers the result). Beside the road, `supervisor` keeps the
places of the node filled with engines on the newest version, and `reports` tells the hub how they are.
"""
