"""The model as the trainer computes it.

- `model`: load and shard the policy; `adapters`: its LoRA adapters; `fused`: fused GPU kernels
- `logprobs`: log-probs of given tokens; `output_layer`: computes them inside the model, with the logits of a chunk of
  positions at a time
- `packed`: rows of several sequences; `prefixes`: their shared prefixes; `attention`: its parts and kernel calls;
  `context`: rows divided over ranks; `routing_replay`: the engine's choice of experts
- `packing_check`: which models cannot be packed; `canary`: the text that engines are checked against
- `from_gguf`, `tiny_model`: make a model's folder before a run
"""
