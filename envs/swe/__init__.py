"""SweEnv: an environment in which the policy fixes a bug in a small repository, in a sandbox. Hidden tests decide."""

from envs.swe.env import SweEnv, SweOptions

__all__ = ["SweEnv", "SweOptions"]
