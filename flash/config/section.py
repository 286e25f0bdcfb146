"""What the tables of the configuration are made of."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MOST = 2**31 - 1
"""The largest of any count: what libraries below hold in 32 bits."""

Positive = Annotated[int, Meta(gt=0, le=MOST)]
NonNegative = Annotated[int, Meta(ge=0, le=MOST)]
Seed = NonNegative
LearningRate = Annotated[float, Meta(gt=0, le=1)]
"""Adam moves each weight by about the learning rate: above 1 nothing of a model is left after a step."""
LOWEST_TEMPERATURE = 0.01
"""Engines take what is below for this, and so would sample from another distribution than the trainer assumes."""
HIGHEST_TEMPERATURE = 100
Temperature = Annotated[float, Meta(ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)]
Deadline = Annotated[float, Meta(ge=0.1, le=1e8)]
"""Seconds. Nothing that crosses a network is there for sure within a tenth of one; clocks end at some centuries."""
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
"""Of what has to decay."""
Fraction = Annotated[float, Meta(ge=0, le=1)]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the configuration."""
