"""ToolEnv: problems of another environment, with functions that the policy may call before it answers."""

from envs.tools.env import ToolEnv, ToolOptions

__all__ = ["ToolEnv", "ToolOptions"]
