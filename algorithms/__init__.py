"""Objectives of the policy, and their parts: advantages, corrections, aggregation. All are pure functions of tensors.

Importing this package does not import torch, so that a configuration can be read and checked without it.
"""

from __future__ import annotations

OBJECTIVES: dict[str, str] = {
    "grpo": "algorithms.objectives.clipped:Grpo",
    "dapo": "algorithms.objectives.clipped:Dapo",
    "dr_grpo": "algorithms.objectives.clipped:DrGrpo",
    "ppo": "algorithms.objectives.clipped:Ppo",
    "asyppo": "algorithms.objectives.trust_region:AsyPpo",
    "decoupled_ppo": "algorithms.objectives.trust_region:DecoupledPpo",
    "tis": "algorithms.objectives.trust_region:Tis",
    "tis_reinforce": "algorithms.objectives.reinforce:TisReinforce",
    "topr": "algorithms.objectives.sequence:Topr",
    "topr_weighted": "algorithms.objectives.sequence:ToprWeighted",
    "cispo": "algorithms.objectives.reinforce:Cispo",
    "gspo": "algorithms.objectives.sequence:Gspo",
    "reinforce_pp": "algorithms.objectives.clipped:ReinforcePp",
    "rloo": "algorithms.objectives.reinforce:Rloo",
    "kimi15": "algorithms.objectives.sequence:Kimi15",
    "aipo": "algorithms.objectives.reinforce:Aipo",
    "m2po": "algorithms.objectives.trust_region:M2po",
}
"""Name in the configuration → `module:Class`, a subclass of `algorithms.base.Objective`."""
