"""Sampler of answers from a small causal language model, many at once, with a cache of keys and values.

It holds a second copy of the policy: the trainer's is sharded and runs packed sequences only. Prompts of one call have
equal length, so nothing is padded; a finished answer is decoded on with the others and cut off afterwards.

Shape legend: N = prompts, C = answers per prompt, P = tokens of a prompt, V = vocabulary,
R = answers of all prompts, T = tokens of an answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast


class Answer(NamedTuple):
    """A sampled answer, with the values that training needs."""

    prompt: list[int]
    """Token ids."""
    tokens: list[int]
    """Token ids, the end-of-text token included."""
    logp: list[float]
    """Log-prob of each token under the policy that sampled it."""
    text: str
    """The text, without the end-of-text token."""
    truncated: bool
    """True if the limit came before the end-of-text token."""


class Sampler:
    """A policy that samples and is not trained. The harness gives it the trainer's weights after each step."""

    def __init__(self, path: str) -> None:
        """Load the model folder at `path`, in float32."""
        self.tokenizer = cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(path))
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self._parameters = dict(self.model.named_parameters())
        self._end = cast("int", self.tokenizer.eos_token_id)

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Replace all weights by the tensors of these names. A missing name is an error of the program."""
        missing = set(self._parameters)
        for name, value in tensors:
            self._parameters[name].copy_(value)
            missing.discard(name)
        assert not missing, f"no new weights for {sorted(missing)}"

    @torch.inference_mode()
    def sample(self, prompts: list[str], *, copies: int, limit: int, generator: torch.Generator | None) -> list[Answer]:
        """Sample `copies` answers of at most `limit` tokens to each prompt; the answers to one prompt stand in a row.

        The temperature is 1. Without a generator each token is the most likely one.
        """
        prompt_ids: list[list[int]] = [self.tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        prompt_NP = torch.tensor(prompt_ids)
        cache = DynamicCache()
        logits_NV = self.model(prompt_NP, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        cache.batch_repeat_interleave(copies)
        logits = logits_NV.repeat_interleave(copies, dim=0)
        # Tokens that were chosen in each turn of the loop, and their log-probs, one for each of the R answers.
        tokens: list[Tensor] = []
        logp: list[Tensor] = []
        ended = torch.zeros(len(logits), dtype=torch.bool)
        while True:
            all_logp = logits.log_softmax(-1)
            if generator is None:
                chosen = all_logp.argmax(-1, keepdim=True)
            else:
                chosen = torch.multinomial(all_logp.exp(), 1, generator=generator)
            tokens.append(chosen[:, 0])
            logp.append(all_logp.gather(-1, chosen)[:, 0])
            ended |= chosen[:, 0] == self._end
            if len(tokens) == limit or bool(ended.all()):
                break
            logits = self.model(chosen, past_key_values=cache, use_cache=True).logits[:, -1]
        columns = torch.stack(tokens, 1).tolist(), torch.stack(logp, 1).tolist()
        rows = zip(*columns, strict=True)
        return [self._answer(prompt_ids[row // copies], *columns) for row, columns in enumerate(rows)]

    def _answer(self, prompt: list[int], tokens: list[int], logp: list[float]) -> Answer:
        """Return the answer of one row, up to and including the end token. `logp` are the log-probs of `tokens`."""
        truncated = self._end not in tokens
        count = len(tokens) if truncated else tokens.index(self._end) + 1
        text = "".join(self.tokenizer.convert_ids_to_tokens(tokens[: count if truncated else count - 1]))
        return Answer(prompt, tokens[:count], logp[:count], text, truncated)
