"""The hub's side of the trainer ranks: their coming and going (`trainers`, `incarnations`), and the steps that they
train, once or again (`steps`). `shards` is the ranks' own end: fetching a batch.
"""
