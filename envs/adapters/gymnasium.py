"""Gymnasium: environments that show text, and take text or one of a few named actions.

The observation is shown if it is text; otherwise the environment's `ansi` rendering is shown. An answer that names no
action changes nothing. The environment's blocking calls run in a worker thread.
"""

from __future__ import annotations

from typing import Any, cast

import gymnasium
import msgspec
from gymnasium.spaces import Discrete, Text

from flash.environment import Info, StepResult
from flash.errors import ConfigError, EnvError


class GymnasiumOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Name, arguments and actions of the environment."""

    id: str
    """Name in Gymnasium's registry. `module:Name-v0` imports the module first."""
    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of the environment, such as `{ map_name = "8x8" }`."""
    actions: list[str] = msgspec.field(default_factory=list)
    """Names of the actions, in order, if actions are numbers. The last word of an answer names the action, in upper or
    lower case."""
    instructions: str = ""
    """Text before the first observation."""


class Gymnasium:
    """Environment of one episode. The rollout node makes one object for each episode."""

    def __init__(self, options: GymnasiumOptions) -> None:
        self._options = options
        self._env = _make(options)
        """Gymnasium's environment of the episode."""
        self._shown = ""
        """Observation that was shown last."""

    @classmethod
    def check(cls, options: GymnasiumOptions) -> None:
        """Make one environment, and check its actions and its observations.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: the environment cannot be made, or it shows or takes something other than text.
        """
        try:
            env = _make(options)
        except (gymnasium.error.Error, ImportError, TypeError) as error:
            raise ConfigError(f"{options.id} cannot be made: {error}") from error
        env.close()
        actions = env.action_space.n if isinstance(env.action_space, Discrete) else 0
        if not isinstance(env.observation_space, Text) and env.render_mode != "ansi":
            raise ConfigError(f'{options.id} shows no text; where it can: kwargs = {{ render_mode = "ansi" }}')
        different = len({name.casefold() for name in options.actions})
        fits = different == len(options.actions) == actions
        if not fits or not (actions or isinstance(env.action_space, Text)):
            raise ConfigError(f"{options.id} takes {env.action_space}: give `actions` as many different names")
        for name in options.actions:
            if _last_word(name) != name.casefold():
                raise ConfigError(f"actions must be single words, because the last word counts, but one is {name!r}")

    def reset(self, seed: int) -> tuple[str, Info]:
        """Start an episode with this seed, and return its first observation after the instructions.

        Raises EnvError if neither the observation nor the rendering is text.
        """
        observation, _ = self._env.reset(seed=seed)
        self._shown = self._text(observation)
        return self._options.instructions + self._shown, {}

    def step(self, action: str) -> StepResult:
        """Take the action that the answer names. The last observation is shown again if the answer names none.

        Returns (observation, reward, terminated, truncated, info). Raises EnvError if neither the new observation nor
        the rendering is text.
        """
        chosen: Any = action
        if self._options.actions:
            word, names = _last_word(action), [name.casefold() for name in self._options.actions]
            if word not in names:
                return self._shown, 0.0, False, False, {"metrics": {"unreadable": 1.0}}
            space = cast("Discrete", self._env.action_space)
            chosen = int(space.start) + names.index(word)
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        self._shown = self._text(observation)
        return self._shown, float(reward), terminated, truncated, {"metrics": {"unreadable": 0.0}}

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _text(self, observation: object) -> str:
        """Return an observation as text. Raises EnvError if neither it nor the rendering is text."""
        shown = observation if isinstance(observation, str) else self._env.render()
        if not isinstance(shown, str):
            raise EnvError(f"{self._options.id} showed no text but {type(shown).__name__}")
        return shown


def _last_word(answer: str) -> str:
    """Return the last word of an answer, in lower case and without punctuation around it; empty if there is none."""
    return (answer.split() or [""])[-1].strip(".,:;!*`'\"").casefold()


def _make(options: GymnasiumOptions) -> gymnasium.Env[Any, Any]:
    """Make Gymnasium's environment. Raises gymnasium.error.Error, ImportError or TypeError if it cannot be made."""
    # Gymnasium's checker warns about each action outside of the action space, and most texts of a policy are outside.
    return gymnasium.make(options.id, disable_env_checker=True, **options.kwargs)
