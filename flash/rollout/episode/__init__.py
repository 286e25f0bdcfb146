"""Episodes: each plays one lease, in which an environment and the policy take turns, and makes a trajectory of it.

The scheduler calls `EpisodePlayer.play` in `episode` for each lease, which assigns a task to this node; the episode
asks the node's proxy for responses.

- `transcript` keeps the tokens of an episode; `view` lets the environment read and steer the episode.
- `ahead` samples responses before the episode reaches them, if the environment announces them.
- `tokenizer` makes the tokens, with `chat_template` for chat messages and `controls` for control tokens.
- `phases` decides when environments may step and when episodes may generate.
- `rehearsal` plays one turn before any engine starts.
"""
