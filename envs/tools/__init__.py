"""ToolEnv: another environment's problems, with functions that the policy may call before it answers."""

from envs.tools.env import ToolEnv, ToolOptions

__all__ = ["ToolEnv", "ToolOptions"]
