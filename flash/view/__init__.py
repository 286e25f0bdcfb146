"""`flash view`: runs in the browser, from what they have written into their directories.

app         the page over HTTP, which `flash.http` serves; way in: `make_app`
runs        the runs that are shown; way in: `open_runs`
charts      which charts there are, and what they mean
samples     samples to look for, and the groups they are of
cluster     the cluster at this moment, and its numbers
timeline    what each process did when
prometheus  the newest numbers, for a monitoring system
"""
