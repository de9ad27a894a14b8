"""The shell. `start` is what the installed `llamarium` calls; `main.py` has the rest."""

import signal
import sys


def start() -> int:
    """Run the process's command line and return its exit code.

    Until `main` can end an interrupted command in order, Ctrl-C simply ends the process: Python's own way would show
    where its imports were. Where Ctrl-C was to be ignored from the outside (`nohup`), it stays so.
    """
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llamarium.cli.main import TRAINING, command_name, main
    from llamarium.kernels.threads import spin_briefly
    from llamarium.system import prepare_streams

    if command_name(sys.argv[1:]) in TRAINING:
        spin_briefly()
    prepare_streams()
    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return main()
