"""Relay: connects a sandbox without a network to exactly one address, over the sandbox's own channel."""
