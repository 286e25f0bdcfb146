"""A configuration as its run records it: whatever reads it later may do so from any folder."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from flash.config.check_models import is_hub_id
from flash.config.objects import own_folders
from flash.config.tree import Config

HOME = Path(__file__).parents[2]
"""Where Flash itself is imported from, which is there anyway."""

AnySection = TypeVar("AnySection", bound=msgspec.Struct)


def recorded(config: Config) -> Config:
    """The same with absolute paths of its models, its run and its modules. Options of an environment are its own, and
    stay as they are."""
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
    """With an absolute path, where it is one."""
    path: str | None = getattr(section, key)
    if path is None or is_hub_id(path):
        return section
    return msgspec.structs.replace(section, **{key: str(Path(path).absolute())})
