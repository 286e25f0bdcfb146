"""Recorded configuration: the form in which a run writes its configuration, so that it can be read from any folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from flash.config.check_models import is_hub_id
from flash.config.objects import own_folders
from flash.config.tree import Config

HOME = Path(__file__).parents[2]
"""Folder from which Flash itself is imported. It need not be recorded, since it is always there."""

AnySection = TypeVar("AnySection", bound=msgspec.Struct)


def recorded(config: Config) -> Config:
    """Return the configuration with absolute paths of its models, its run and its modules.

    Options of an environment are not changed, because only the environment knows which of them are paths.
    """
    algorithm, kl, teacher = config.algorithm, config.algorithm.kl, config.algorithm.teacher
    folders = [folder for folder in own_folders() if Path(folder).resolve() != HOME]
    return msgspec.structs.replace(
        config,
        run=msgspec.structs.replace(config.run, output_dir=str(Path(config.run.output_dir).absolute())),
        model=_placed(config.model),
        env=msgspec.structs.replace(config.env, folders=folders),
        critic=config.critic and _placed(config.critic),
        sft=config.sft and _placed(_placed(config.sft, "data"), "held_out"),
        algorithm=msgspec.structs.replace(
            algorithm, kl=kl and _placed(kl, "reference"), teacher=teacher and _placed(teacher)
        ),
    )


def _placed(section: AnySection, key: str = "path") -> AnySection:
    """Return the section with the path in `key` made absolute. Hub ids and None stay unchanged."""
    path: str | None = getattr(section, key)
    if path is None or is_hub_id(path):
        return section
    return msgspec.structs.replace(section, **{key: str(Path(path).absolute())})
