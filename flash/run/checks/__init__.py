"""Checks before any work: for `flash train` (`preflight`), its option `--dry-run` (`dry_run`), and `flash doctor`."""
