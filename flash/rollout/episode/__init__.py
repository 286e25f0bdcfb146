"""Episodes: one environment's life each, the texts and tokens that pass between it and the policy.

`episode` is the way in; `transcript` keeps the tokens, `view` shows them to the environment, `tokenizer` makes them,
`phases` says who may step when.
"""
