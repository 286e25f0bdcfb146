"""A player's process: `python -m envs.textworld`, see `envs.textworld.games`."""

import sys

from envs.textworld.games import serve

serve(sys.argv[1:])
