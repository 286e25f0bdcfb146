"""Imported by a fork server, and nowhere else: with that it imports all that its processes are made of."""

from flash.foreign.forking import serve

serve()
