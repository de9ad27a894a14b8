"""`python -m llamarium`, the same as `llamarium`."""

import sys

from llamarium.cli.main import main

sys.exit(main())
