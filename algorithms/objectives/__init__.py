"""Policy objectives by family; `algorithms.OBJECTIVES` maps their names to classes of these files.

- `clipped`: PPO's clipped surrogate around the policy that sampled (`grpo`, `dapo`, `dr_grpo`, `reinforce_pp`, `ppo`)
- `reinforce`: A · log π with a bounded importance weight per token (`rloo`, `tis_reinforce`, `cispo`, `aipo`)
- `sequence`: one ratio for a whole response (`gspo`, `topr`, `topr_weighted`, `kimi15`)
- `trust_region`: a clip around another policy than the policy that sampled, or a bound that depends on the whole batch
  (`decoupled_ppo`, `tis`, `asyppo`, `m2po`)

`algorithms.base` defines the interface and the tensors that all formulas use. All formulas are maximised; `__call__`
returns the negative as loss. In all of them, r is π_θ / π_behaviour of one token unless the formula says otherwise, and
sg(x) is x without gradient.
"""
