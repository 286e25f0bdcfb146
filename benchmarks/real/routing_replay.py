"""What it does to log-probs that engine and trainer choose different experts, and that the trainer is told them.

A mixture of random weights in the shape of Qwen 3 (8 layers of 32 experts, 4 of a token) samples answers in bfloat16
through plain transformers, which tells its experts; vLLM's build for the CPU does not. A trainer of the same weights
says of the tokens what it makes of them. Random routers are less sure than trained ones, so more tokens get others.

`gap` is the mean absolute difference of log-probs and `k3` the mean of exp(d) − 1 − d, both in nats, each with and
without replay. `other_experts` is the share of tokens and layers whose experts differ without it, and `bytes` what a
token's take in a trajectory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.form import Args, Row, main

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel

ANSWERS, QUICK_ANSWERS = 32, 4
PROMPT, NEW = 16, 112
"""Tokens of a prompt, and of an answer."""
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "initializer_range": 0.06,
}


def record(model: PreTrainedModel) -> dict[int, Any]:
    """Where the routers of a model will put the experts that they choose, by layer."""
    from flash.foreign.transformers import routers

    seen: dict[int, Any] = {}
    for router in routers(model):
        router.module.register_forward_hook(lambda _, __, output, at=router.layer: seen.__setitem__(at, output[2]))
    return seen


def sampled(engine: PreTrainedModel, answers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [answers, length], log-probs of all but the first, and experts of all."""
    import numpy as np
    import torch

    seen, generator = record(engine), torch.Generator().manual_seed(0)
    vocabulary = SHAPE["vocab_size"]
    prompts = torch.randint(0, vocabulary, (answers, PROMPT), generator=generator)
    torch.manual_seed(0)
    with torch.no_grad():
        ids = engine.generate(prompts, do_sample=True, top_k=0, min_new_tokens=NEW, max_new_tokens=NEW)
        rows = engine(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
    logprobs = rows.gather(-1, ids[:, 1:, None])[..., 0]
    routes = np.stack([seen[at].numpy() for at in range(SHAPE["num_hidden_layers"])], 1)
    return ids.numpy(), logprobs.numpy(), routes


def measure(args: Args) -> list[Row]:
    """Trainers in both precisions, told and not."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    from flash.config.tree import ModelConfig
    from flash.foreign.torch import single_process_group
    from flash.sampling import Routes
    from flash.trainer.mesh import trainer_mesh
    from flash.trainer.model.logprobs import token_logprobs
    from flash.trainer.model.model import shard_model
    from flash.trainer.model.packing_check import replay_routing
    from flash.trainer.packing import in_one_row

    def made(dtype: torch.dtype) -> PreTrainedModel:
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SHAPE), dtype=torch.float32).to(dtype).eval()

    ids, behaviour, routes = sampled(made(torch.bfloat16), QUICK_ANSWERS if args.quick else ANSWERS)
    told = Routes.of(routes)
    packed = in_one_row(list(ids))
    action_T = np.concatenate([np.arange(PROMPT, PROMPT + NEW) + start for start in packed.offset_S[:-1]])
    behaviour_T = torch.from_numpy(behaviour[:, PROMPT - 1 :].reshape(-1)).double()
    rows: list[Row] = []
    with single_process_group("gloo"):
        for dtype in ("float32", "bfloat16"):
            config = ModelConfig(path="", dtype=dtype)
            model = shard_model(made(torch.bfloat16).float(), trainer_mesh("cpu"), config)
            replay_routing(model)
            own = record(model)
            for case, sequences in (("own experts", packed), ("replay", packed._replace(routes=told))):
                with torch.no_grad():
                    now_T = token_logprobs(model, sequences, action_T - 1, packed.input_P[action_T]).logp_T.double()
                gap_T = now_T - behaviour_T
                name = f"trainer in {dtype}, {case}"
                rows += [
                    Row(name, "gap", "nats", float(gap_T.abs().mean())),
                    Row(name, "k3", "nats", float((gap_T.exp() - 1 - gap_T).mean())),
                ]
                chosen = np.stack([own[at].numpy() for at in range(SHAPE["num_hidden_layers"])], 1)
                other = (np.sort(chosen, -1) != np.sort(routes[packed.computed.place_U], -1)).any(-1).mean()
                rows.append(Row(name, "other_experts", "", float(other)))
    return [*rows, Row("a token", "bytes", "per token", len(told.ids) / told.tokens)]


if __name__ == "__main__":
    main("routing_replay", __doc__ or "", measure)
