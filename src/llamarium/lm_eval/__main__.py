"""`python -m llamarium.lm_eval ...`: the harness's own command, with the model `llamarium` registered."""

import importlib
import sys

from llamarium.errors import LlamariumError
from llamarium.lm_eval.harness import harness


def main() -> int:
    """Run the harness with this process's arguments and return the exit code."""
    try:
        command = harness("__main__").cli_evaluate
        harness("evaluator")  # what the command imports later, and needs the most packages
        importlib.import_module("llamarium.lm_eval.adapter")  # registers the model
        command()
    except LlamariumError as error:
        sys.stderr.write(f"llamarium: error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
