"""ToolEnv: problems of another environment, with functions that the policy may call before it answers.

`envs.tools.env` has the environment, `envs.tools.runner` the interface of tools, and the other modules toolsets.
"""

from envs.tools.env import ToolEnv, ToolOptions

__all__ = ["ToolEnv", "ToolOptions"]
