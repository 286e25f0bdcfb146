"""Relay: connects a sandbox without a network to exactly one address, over the sandbox's own channel.

`envs.relay.boxed` runs agents in such sandboxes. `outside` is the relay's end here, `inside` the end in the sandbox.
"""
