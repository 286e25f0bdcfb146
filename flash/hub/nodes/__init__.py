"""The hub's side of the rollout nodes: joining (`members`), what they are (`fleet`), leases (`dealing`, `claims`) and
the weights of their engines (`versions`). The way in is `nodes`.
"""
