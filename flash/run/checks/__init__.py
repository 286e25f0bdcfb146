"""Checks before any work: for `flash train` (`preflight`), its option `--dry-run` (`dry_run`), `flash doctor`, and
`flash check-env` (`env`)."""
