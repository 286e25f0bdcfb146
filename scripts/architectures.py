"""Check how exactly the trainer runs a tiny model of every kind of causal language model of transformers.

`PYTHONPATH=. python scripts/architectures.py [KIND …]` runs each model on a few short sequences in the way of the
trainer: packed in a row if the trainer's check allows it, else one at a time. It compares log-probs and gradients with
those of the unchanged model of transformers, in float32. It prints the row of each kind as a line of JSON. Without
KIND, it also writes all rows to benchmarks/results/architectures.json, whose largest error docs/overview.md quotes. Run
it after an update of transformers.

A row has the `kind` and its class, and `way`, the way in which the trainer runs it:

    packed   all sequences in a row
    alone    one sequence at a time
    refused  the trainer refuses the model, for the reason `why`
    none     no tiny model could be made, or it did not run within SECONDS; `why` is the error

A row of the first two ways has two errors. `logprob_error` is the largest absolute error of a log-prob in nats.
`gradient_error` is the norm of the gradient's error divided by the norm of the gradient.
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
"""File of the recorded rows."""
LENGTHS = (9, 5, 21)
"""Lengths of the sequences, in tokens. The last is longer than `WINDOW`; `compare` adds one that begins like it."""
WINDOW = 8
"""Tokens of the sliding window, in models that have one."""
SECONDS = 120
"""Largest number of seconds for one kind of model."""
LARGEST_ERROR = 1e-3
"""Largest error of log-probs, in nats, and of gradients, relative to their norm. Exact kinds have about 1e-6."""
MOST_BYTES = 12 * 2**30
"""Largest address space of this process, in bytes. Some kinds have no tiny model: with this limit their row fails, and
not the whole machine."""


def compare(kind: str, *, compiled: bool = False, **options: Any) -> dict[str, Any]:
    """Return the row of one kind of model, which the module's docstring describes.

    `kind` is a `model_type` of transformers, and `options` are changes to its configuration. If `compiled` is True, the
    layers are traced by torch.compile, like on a GPU, but without generated kernels.

    Errors of the model of transformers, and a ConfigError or TimeoutError of the trainer, become a row. Any other error
    of the trainer is raised, because it is a fault of Flash.
    """
    row: dict[str, Any] = {"kind": kind, "class": MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[kind]].__name__}
    try:  # the model of transformers, as it is
        unchanged = tiny(kind, **_windows(kind) | OPTIONS.get(kind, {}) | options).eval()
        if takes_attention(unchanged):
            unchanged.set_attn_implementation(default_attention(unchanged))
        sequences = random_sequences(unchanged.config.get_text_config().vocab_size, LENGTHS)
        # This sequence begins like the last one, so that packing must not mix tokens of equal beginnings.
        sequences.append(torch.cat([sequences[-1][:12], sequences[0]]))
        model = deepcopy(unchanged)
        # `one_by_one` returns log-probs and entropies, from one forward pass for each sequence.
        expected_T, expected = _logprobs_and_gradients(unchanged, one_by_one(unchanged, sequences)[0])
    except Exception as error:  # Code of transformers may fail with any error. The row reports it.
        return row | {"way": "none", "why": _first_line(error)}
    config = make_config(Path("unused"), train={"max_tokens_per_microbatch": 128})
    config = replace(config, model=replace(config.model, max_length=64))
    if compiled:
        torch.compiler.reset()
        fuse_layers(model, whole=takes_attention(model), compiled=partial(torch.compile, backend="aot_eager"))
    try:  # the same model in the way of the trainer
        check_packing(shard_model(model, trainer_mesh("cpu"), config.model), config)
        packed_rows = [sequences] if takes_packed_rows(model) else [[sequence] for sequence in sequences]
        logp_T, found = _logprobs_and_gradients(
            model, torch.cat([token_logprobs(model, **packed_batch(packed)).logp_T for packed in packed_rows])
        )
    except ConfigError as error:
        return row | {"way": "refused", "why": _first_line(error)}
    except TimeoutError as error:
        return row | {"way": "none", "why": _first_line(error)}
    # Norms of the whole gradient and of the whole difference, from those of single parameters.
    whole = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    difference = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()]).norm()
    return row | {
        "way": "packed" if takes_packed_rows(model) else "alone",
        "logprob_error": float((logp_T - expected_T).abs().max()),
        "gradient_error": float(difference / whole),
    }


def _windows(kind: str) -> dict[str, int]:
    """Return options that make the sliding windows of a kind short; empty if it has none."""
    known = CONFIG_MAPPING[kind]()
    return {name: WINDOW for name in ("sliding_window", "attention_chunk_size") if getattr(known, name, None)}


def is_exact(row: dict[str, Any]) -> bool:
    """Return True unless the trainer runs this kind of model with an error above LARGEST_ERROR, or with NaN.

    Models that the trainer does not run are no error. NaN is not below any limit, so it makes the result False.
    """
    if row["way"] not in ("packed", "alone"):
        return True
    return all(row[error] <= LARGEST_ERROR for error in ("logprob_error", "gradient_error"))


def _logprobs_and_gradients(model: PreTrainedModel, logp_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the gradient of a loss that is a weighted sum of the log-probs `logp_T` of a model.

    Returns the log-probs without their graph, and the gradient of each parameter by its name. Parameters without a
    gradient are left out. `logp_T` was computed by `model`, whose gradients are empty before.
    """
    # Different weights, so that errors of different tokens do not cancel out.
    (logp_T @ torch.linspace(-1, 1, len(logp_T))).backward()
    grads: dict[str, Any] = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    # The gradient of a sharded parameter is a DTensor, whose `full_tensor` is the whole gradient.
    return logp_T.detach(), {
        name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in grads.items()
    }


def _first_line(error: Exception) -> str:
    """Return the type and the first line of an error, for the row."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def _raise_timeout(*_: Any) -> None:
    """Raise TimeoutError, when the alarm signal comes: a kind of model has taken SECONDS."""
    raise TimeoutError(f"not done after {SECONDS} s")


def main() -> int:
    """Print the rows. Returns 1 if the trainer runs a model inexactly, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help="as in config.json's model_type; all by default")
    parser.add_argument("--compiled", action="store_true", help="trace layers as on a GPU; rows are not kept")
    args = parser.parse_args()
    kinds, compiled = args.kinds, args.compiled
    known = sorted(kind for kind, made in CONFIG_MAPPING.items() if made in MODEL_FOR_CAUSAL_LM_MAPPING)
    logging.getLogger("flash").setLevel(logging.ERROR)
    signal.signal(signal.SIGALRM, _raise_timeout)
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
    return int(not all(map(is_exact, rows)))


if __name__ == "__main__":
    sys.exit(main())
