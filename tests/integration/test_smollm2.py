"""The pretrained model that `flash fetch` makes says what such a model says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flash.config.tree import ModelConfig
from flash.rollout.tokenizer import HfTokenizer
from flash.trainer.model import load_model
from flash.types import Message

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_it_knows_the_capital_of_france(smollm2: Path) -> None:
    config = ModelConfig(path=str(smollm2))
    tokenizer, model = HfTokenizer(config), load_model(config)
    prompt = torch.tensor([tokenizer.render([Message("user", "What is the capital of France?")])])
    with torch.inference_mode():
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False)
    said = tokens[0, prompt.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(said)
    assert tokenizer.token_texts(said)[-1] == "<|im_end|>"
