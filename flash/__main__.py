"""Entry point of `python -m flash`."""

import sys

from flash.cli.main import main

sys.exit(main())
