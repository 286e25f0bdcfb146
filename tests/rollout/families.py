"""Tokenizers of four families of models, with a small vocabulary in place of the real one.

The chat templates are those of `tests.envs.forms`. Added tokens, normalizer, pre-tokenizer and decoder are as in the
families' files: Qwen3 normalizes text, Llama 3 looks for a whole word in its vocabulary first, Mistral writes spaces as
`▁` and puts one first, and GPT-OSS splits words by another expression.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flash.config.tree import ModelConfig
from flash.rollout.episode.tokenizer import HfTokenizer
from tests.envs.forms import FORMS, SHOWN, SPECIAL

WORDS = {
    "qwen": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
    "llama": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+",
    "gpt_oss": r"[^\r\n\p{L}\p{N}]?[\p{Lu}]*[\p{Ll}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
}
MERGES = [("Ġ", "t"), ("i", "n"), ("Ġt", "h"), ("<", "|"), ("|", ">"), ("i", "m"), ("e", "n"), ("en", "d"), ("[", "/")]
FAMILIES = tuple(FORMS)


def family(name: str, folder: Path, template: str | None = None) -> HfTokenizer:
    """Write the tokenizer of a family to a folder, and return it as read from there."""
    inner = _pieces(name) if name == "mistral" else _bytes(name)
    form = FORMS[name]
    fast: Any = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token=form.end,
        unk_token="<unk>" if name == "mistral" else None,
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL[name]])
    fast.add_tokens([AddedToken(one, special=False, normalized=False) for one in SHOWN.get(name, [])])
    fast.chat_template = form.template if template is None else template
    fast.save_pretrained(folder)
    return HfTokenizer(ModelConfig(path=str(folder)))


def _bytes(name: str) -> Tokenizer:
    """Return a byte-level BPE tokenizer in the manner of the family `name`: Qwen, Llama and others."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in MERGES)]
    # A word that its vocabulary has, and that is a control token's text too.
    words += ["<|eot_id|>"] if name == "llama" else []
    vocabulary = {word: at for at, word in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=MERGES, ignore_merges=name == "llama"))
    if name == "qwen":
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS[name]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    return inner


def _pieces(name: str) -> Tokenizer:
    """Return a SentencePiece-like BPE tokenizer, with a token for each byte, in the manner of the family `name`."""
    words = ["<unk>", *SPECIAL[name], *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("▁", "t"), ("i", "n"), ("[", "/"), ("t", "h"), ("I", "N")]
    words += [left + right for left, right in merges]
    model: Any = models.BPE(
        vocab={word: at for at, word in enumerate(words)},
        merges=merges,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    inner = Tokenizer(model)
    inner.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner
