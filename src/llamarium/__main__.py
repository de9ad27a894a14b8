"""`python -m llamarium`, the same as `llamarium`."""

import sys

from llamarium.cli import start

sys.exit(start())
