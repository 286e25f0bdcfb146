"""What is tried before any work: by `flash train` (`beforehand`), by `--dry-run`, and by `flash doctor`."""
