"""`flash view`: shows runs in the browser, from the files in their run directories.

app         the page over HTTP, which `flash.http` serves; entry point: `make_app`
runs        the runs that are shown; entry point: `open_runs`
charts      the charts of the overview and their explanations
samples     search in samples, and the groups that contain them
cluster     the current state of the cluster
timeline    the activities of each process over time
prometheus  the newest numbers, for a monitoring system
"""
