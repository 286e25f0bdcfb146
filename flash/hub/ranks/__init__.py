"""The hub's side of the trainer ranks: their coming and going (`trainers`, `incarnations`), the steps that they train
(`steps`), and what they train again after a loss (`recovery`). `shards` is the ranks' own end: fetching a batch.
"""
