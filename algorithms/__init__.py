"""Advantages, corrections, aggregation and, in `objectives`, what they serve: pure functions on packed tokens.

Importing this package needs no torch.
"""

from __future__ import annotations

OBJECTIVES: dict[str, str] = {
    "grpo": "algorithms.objectives.grpo:Grpo",
    "dapo": "algorithms.objectives.dapo:Dapo",
    "dr_grpo": "algorithms.objectives.dr_grpo:DrGrpo",
    "ppo": "algorithms.objectives.ppo:Ppo",
    "asyppo": "algorithms.objectives.asyppo:AsyPpo",
    "decoupled_ppo": "algorithms.objectives.decoupled_ppo:DecoupledPpo",
    "tis": "algorithms.objectives.tis:Tis",
    "tis_reinforce": "algorithms.objectives.tis_reinforce:TisReinforce",
    "topr": "algorithms.objectives.topr:Topr",
    "topr_weighted": "algorithms.objectives.topr_weighted:ToprWeighted",
    "cispo": "algorithms.objectives.cispo:Cispo",
    "gspo": "algorithms.objectives.gspo:Gspo",
    "reinforce_pp": "algorithms.objectives.reinforce_pp:ReinforcePp",
    "rloo": "algorithms.objectives.rloo:Rloo",
    "kimi15": "algorithms.objectives.kimi15:Kimi15",
    "aipo": "algorithms.objectives.aipo:Aipo",
    "m2po": "algorithms.objectives.m2po:M2po",
}
"""Name in the configuration → `module:Class` of the `algorithms.base.Objective`."""
