"""Policy objectives, advantages and aggregation: pure functions on packed tokens, one file per method.

Importing this package needs no torch.
"""

from __future__ import annotations

OBJECTIVES: dict[str, str] = {
    "grpo": "algorithms.grpo:Grpo",
    "decoupled_ppo": "algorithms.decoupled_ppo:DecoupledPpo",
}
"""Name in the configuration → `module:Class` of the `algorithms.base.Objective`."""
