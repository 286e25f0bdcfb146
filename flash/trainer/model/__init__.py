"""The model as the trainer computes it.

- `model`: load and shard the policy; `adapters`: its LoRA adapters; `fused`: fused GPU kernels
- `logprobs`: log-probs of given tokens, and the output layer that computes them inside the model
- `packed`: rows of several sequences; `attention`: the parts of their attention, and its kernel calls; `context`: rows
  divided over ranks; `routing_replay`: the engine's choice of experts
- `packing_check`: which models cannot be packed; `canary`: the text that engines are checked against
- `from_gguf`, `tiny_model`: make a model's folder before a run
"""
