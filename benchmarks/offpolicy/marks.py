"""Tokens that chance, or the policy's entropy, chooses: as many as a rhythm of attention would, with the same gain.

What a rhythm of attention is worth shows beside them: chance says what it does that some advantages are larger, and
entropy what a mark does that costs no look at attention.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedModel

from algorithms.rhythm import FloatArray, Rhythm, top_share
from flash.trainer.model.logprobs import policy_logprobs
from flash.trainer.model.model import reshard
from flash.trainer.packing import MicroBatch
from flash.trainer.rhythm import MicroSignals, RhythmPass, trained_responses

OPTIONS = Rhythm()
"""Whose `gain` and `top` are taken."""


class Marks(RhythmPass):
    """Stands where a trainer looks at attention, on one rank and at temperature 1."""

    def __init__(self, by: Literal["random", "entropy"], model: PreTrainedModel, seed: int) -> None:
        super().__init__(OPTIONS, model)
        reshard(model)
        self._by, self._model = by, model
        self._rng = np.random.default_rng(seed)

    def multiply(self, advantage_T: FloatArray, signals: MicroSignals, micro: MicroBatch) -> FloatArray:
        """float64 [T]: the advantages of the chosen tokens multiplied."""
        signal_T = self._signal(micro)
        gamma_T = np.ones(len(micro.target_T))
        for tokens, *_ in trained_responses(micro):
            gamma_T[tokens] = marked(signal_T[tokens])
        self.tally[-2:] += (gamma_T[micro.mask_T] > 1).sum(), micro.mask_T.sum()
        return advantage_T * gamma_T

    def _signal(self, micro: MicroBatch) -> FloatArray:
        if self._by == "random":
            return self._rng.random(len(micro.target_T))
        with torch.no_grad():
            entropy_T = policy_logprobs(self._model, micro).entropy_T
        reshard(self._model)
        return entropy_T.double().cpu().numpy()


def marked(signal_R: FloatArray) -> FloatArray:
    """[R]: γ of each token of a response."""
    return np.where(top_share(signal_R, OPTIONS.top), OPTIONS.gain, 1.0)
