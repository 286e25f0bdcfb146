"""What of the configuration, and of the settings of domains, episodes and the proxy of a node use."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from flash.config.tree import Config
from flash.rollout.episode.episode import EpisodeSettings
from flash.rollout.proxy import ProxySettings
from flash.samples.rules import ONE_KIND, DomainSettings


def episode_settings(config: Config, domains: Mapping[str, DomainSettings] = ONE_KIND.domains) -> EpisodeSettings:
    """The part of the configuration that episodes use, and what differs by domain."""
    run = EpisodeSettings(
        seed=config.run.seed if config.seeded else None,
        max_new_tokens=config.rollout.max_new_tokens,
        max_length=config.model.max_length,
        max_turns=config.rollout.max_turns,
        max_branches=config.rollout.max_branches,
        max_tokens=config.rollout.max_episode_tokens or config.rollout.max_branches * config.model.max_length,
        reset_s=config.deadlines.env_reset,
        step_s=config.deadlines.env_step,
        close_s=config.deadlines.close,
        generate_s=config.deadlines.generate,
        episode_s=config.deadlines.episode,
    )
    own = {
        name: msgspec.structs.replace(run, max_turns=domain.max_turns, max_new_tokens=domain.max_new_tokens)
        for name, domain in domains.items()
    }
    return msgspec.structs.replace(run, domains=own)


def proxy_settings(config: Config) -> ProxySettings:
    """The part of the configuration that the proxy uses."""
    return ProxySettings(
        max_sequences=config.engine.max_sequences,
        swap="beside" if config.adapters > 1 else config.rollout.swap,
        bind_groups=not config.rollout.replicate_prompts,
        swap_s=config.deadlines.swap,
        drain_s=config.deadlines.generate,
    )
