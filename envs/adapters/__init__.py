"""Environments of other frameworks, as they are."""
