"""Adapters for environments of other frameworks, which need no change. A configuration names one as `env.path`."""
