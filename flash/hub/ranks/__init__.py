"""The hub's side of the trainer ranks: their coming and going (`ranks`, `lives`), the steps that they train
(`steps`), and what they train again after a loss (`past`). `shards` is the ranks' own end: fetching a batch, part by
part.
"""
