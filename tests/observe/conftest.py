from __future__ import annotations

from pathlib import Path

import pytest

from flash.config.learning import TrainConfig
from flash.config.tree import Config, EnvConfig, EvalConfig, ModelConfig, RunConfig
from flash.observe.rundir.rundir import RunDirectory


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """Return the configuration of a run of 30 steps."""
    return Config(
        run=RunConfig(name="sample", output_dir=str(tmp_path), steps=30, seed=7),
        model=ModelConfig(path="models/tiny"),
        env=EnvConfig(path="envs.arithmetic:Arithmetic"),
        train=TrainConfig(async_ratio=1.0),
        eval=EvalConfig(samples=4),
    )


@pytest.fixture
def directory(config: Config) -> RunDirectory:
    """Return the directory of a new run."""
    return RunDirectory.open(config.run_dir, "[run]\nname = 'sample'\n")
