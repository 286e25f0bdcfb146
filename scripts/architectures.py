"""Check how the trainer runs a tiny model of every causal language model of transformers, and with which error.

`PYTHONPATH=. python scripts/architectures.py [KIND …]` runs each model on the sequences of a small tree, like the
trainer: packed in a row if the trainer's check allows it, else one at a time. It compares log-probs and gradients with
those of the unchanged model of transformers, in float32. Without KIND, it writes the rows to
benchmarks/results/architectures.json.

    way: packed, alone, refused (by the trainer), none (no tiny model could be made, or it could not run)
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import signal
import sys
from collections import Counter
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from flash.errors import ConfigError
from flash.foreign.torch import single_process_group
from flash.foreign.transformers import default_attention, takes_attention
from flash.trainer.mesh import trainer_mesh
from flash.trainer.model.fused import fuse_layers
from flash.trainer.model.logprobs import token_logprobs
from flash.trainer.model.model import shard_model
from flash.trainer.model.packed import takes_packed_rows
from flash.trainer.model.packing_check import check_packing
from tests.trainer.packed_cases import OPTIONS, one_by_one, packed_batch, random_sequences, tiny
from tests.trainer.trainer_cases import make_config

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "architectures.json"
LENGTHS = (9, 5, 21)
"""Lengths of the sequences, in tokens. The last is longer than `WINDOW`; one more sequence shares its beginning."""
WINDOW = 8
"""Tokens of the sliding window, in models that have one."""
SECONDS = 120
"""Most seconds for one kind of model."""
MOST_BYTES = 12 * 2**30
"""Largest address space of this process, in bytes. Some kinds have no tiny model: with this limit their row fails, and
not the whole machine."""


def compare(kind: str, *, compiled: bool = False, **options: Any) -> dict[str, Any]:
    """Return the row of one kind of model.

    If `compiled` is True, the layers are traced by torch.compile, like on a GPU, but without generated kernels.
    """
    row: dict[str, Any] = {"kind": kind, "class": MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]].__name__}
    try:
        plain = tiny(kind, **_windows(kind) | OPTIONS.get(kind, {}) | options).eval()
        if takes_attention(plain):
            plain.set_attn_implementation(default_attention(plain))
        sequences = random_sequences(plain.config.get_text_config().vocab_size, LENGTHS)
        sequences.append(torch.cat([sequences[-1][:12], sequences[0]]))
        model = deepcopy(plain)
        expected_T, expected = _learned(plain, one_by_one(plain, sequences)[0])
    except Exception as error:  # Code of transformers may fail with any error. The row reports it.
        return row | {"way": "none", "why": _said(error)}
    config = make_config(Path("unused"), train={"max_tokens_per_microbatch": 128})
    config = replace(config, model=replace(config.model, max_length=64))
    if compiled:
        torch.compiler.reset()
        fuse_layers(model, whole=takes_attention(model), compiled=partial(torch.compile, backend="aot_eager"))
    try:
        check_packing(shard_model(model, trainer_mesh("cpu"), config.model), config)
        rows = [sequences] if takes_packed_rows(model) else [[one] for one in sequences]
        logp_T, found = _learned(
            model, torch.cat([token_logprobs(model, **packed_batch(some)).logp_T for some in rows])
        )
    except ConfigError as error:
        return row | {"way": "refused", "why": _said(error)}
    total = torch.stack([one.norm() for one in expected.values()]).norm()
    gap = torch.stack([(found[name] - one).norm() for name, one in expected.items()]).norm()
    return row | {
        "way": "packed" if takes_packed_rows(model) else "alone",
        "logprob_error": float((logp_T - expected_T).abs().max()),
        "gradient_error": float(gap / total),
    }


def _windows(kind: str) -> dict[str, int]:
    """Return options that make the sliding windows of a kind short; empty if it has none."""
    known = CONFIG_MAPPING[kind]()
    return {name: WINDOW for name in ("sliding_window", "attention_chunk_size") if getattr(known, name, None)}


def _learned(model: PreTrainedModel, logp_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs, and the gradient of a loss that is a weighted sum of them, by parameter."""
    (logp_T @ torch.linspace(-1, 1, len(logp_T))).backward()
    grads: dict[str, Any] = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return logp_T.detach(), {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in grads.items()
    }


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _late(*_: Any) -> None:
    raise TimeoutError(f"not done after {SECONDS} s")


def main() -> int:
    """Print the rows. Returns 1 if a model that the trainer accepts has an inexact gradient, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="as in config.json's model_type; all by default")
    parser.add_argument("--compiled", action="store_true", help="trace layers as on a GPU; rows are not kept")
    args = parser.parse_args()
    kinds, compiled = args.kinds, args.compiled
    known = sorted(kind for kind, made in CONFIG_MAPPING.items() if made in MODEL_FOR_CAUSAL_LM_MAPPING)
    logging.getLogger("flash").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, _late)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    rows: list[dict[str, Any]] = []
    with single_process_group("gloo"):
        for kind in kinds or known:
            signal.alarm(SECONDS)
            rows.append(compare(kind, compiled=compiled))
            signal.alarm(0)
            sys.stdout.write(f"{json.dumps(rows[-1])}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{dict(Counter(row['way'] for row in rows))}\n")
    if not kinds and not compiled:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row.get("gradient_error", 0.0) > 1e-3 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
