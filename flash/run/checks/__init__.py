"""Checks before any work: for `flash train` (`preflight`), for its option `--dry-run`, and for `flash doctor`."""
