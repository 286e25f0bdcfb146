"""Policy objectives, advantages, corrections and aggregation: pure functions on packed tokens, one file per method.

Importing this package needs no torch.
"""

from __future__ import annotations

OBJECTIVES: dict[str, str] = {
    "grpo": "algorithms.grpo:Grpo",
    "dapo": "algorithms.dapo:Dapo",
    "dr_grpo": "algorithms.dr_grpo:DrGrpo",
    "ppo": "algorithms.ppo:Ppo",
    "asyppo": "algorithms.asyppo:AsyPpo",
    "decoupled_ppo": "algorithms.decoupled_ppo:DecoupledPpo",
    "tis": "algorithms.tis:Tis",
    "tis_reinforce": "algorithms.tis_reinforce:TisReinforce",
    "topr": "algorithms.topr:Topr",
    "topr_weighted": "algorithms.topr_weighted:ToprWeighted",
    "cispo": "algorithms.cispo:Cispo",
    "gspo": "algorithms.gspo:Gspo",
    "reinforce_pp": "algorithms.reinforce_pp:ReinforcePp",
    "rloo": "algorithms.rloo:Rloo",
    "kimi15": "algorithms.kimi15:Kimi15",
    "aipo": "algorithms.aipo:Aipo",
    "m2po": "algorithms.m2po:M2po",
}
"""Name in the configuration → `module:Class` of the `algorithms.base.Objective`."""
