"""The trainer ranks: they train the policy on shards of batches, and publish each new version of its weights.

The road of a step, from top to bottom: `loop.TrainerLoop.run` fetches a shard from the hub. `step.Trainer.train_round`
packs the shard, counts its tokens and compares its rewards (`plan`, `packing`). It computes the inputs of the loss
(`references`, `plan.token_advantages`, `rhythm`) and the loss of each token (`objective`), and updates the weights
(`optimizer`, `lag`, `critic`). `statistics` collects the metrics of the step. `checkpoint` saves the state that a run
needs to resume. `mesh` arranges the ranks in groups, `memory` predicts their memory, `performance` measures their speed
and memory. `model` loads, shards and packs the language model itself.

The launcher starts one process per rank, which runs `flash.run.trainer_rank.run_trainer_rank`. A *collective* is a
call in which ranks exchange data. All ranks make the same collectives in the same order.
"""
