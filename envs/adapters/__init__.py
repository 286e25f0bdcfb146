"""Adapters for environments of other frameworks, which need no change."""
