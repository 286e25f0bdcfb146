"""SweEnv: mend a bug in a small repository, in a sandbox, turn by turn; tests that nobody sees decide."""

from envs.swe.env import SweEnv, SweOptions

__all__ = ["SweEnv", "SweOptions"]
