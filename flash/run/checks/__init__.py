"""What is tried before any work: by `flash train` (`preflight`), by `--dry-run`, and by `flash doctor`."""
