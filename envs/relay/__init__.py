"""A way out of a sandbox without a network, to one address and no other: over the sandbox's own channel."""
