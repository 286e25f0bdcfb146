"""Commands that read the run directory of a run, finished or in progress. They have the form of those in
`flash.cli`."""
