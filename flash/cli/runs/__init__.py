"""Commands that read what a run has left, or leaves, in its directory; each like those of `flash.cli`."""
