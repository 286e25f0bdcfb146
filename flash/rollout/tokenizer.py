"""The model's tokenizer, as episodes need it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash.config import ModelConfig
from flash.errors import ConfigError
from flash.types import Observation


class HfTokenizer:
    """A Hugging Face tokenizer. Plain text is encoded as it is; messages go through the model's chat template."""

    def __init__(self, config: ModelConfig) -> None:
        from transformers import AutoTokenizer

        local = Path(config.path).is_dir()
        try:
            self.inner: Any = AutoTokenizer.from_pretrained(
                config.path, local_files_only=local, trust_remote_code=config.trust_remote_code
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path = {config.path!r} has no usable tokenizer: {error}") from error

    def render(self, observation: Observation) -> list[int]:
        """Prompt tokens of an observation."""
        if isinstance(observation, str):
            return list(self.inner.encode(observation, add_special_tokens=False))
        messages = [{"role": message.role, "content": message.content} for message in observation]
        rendered = self.inner.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return list(rendered)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of sampled tokens, without special tokens."""
        return str(self.inner.decode(list(token_ids), skip_special_tokens=True))

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token on its own, special tokens shown."""
        return [str(self.inner.decode([token])) for token in token_ids]
