"""How a command line that argparse accepts can still be wrong."""


class UsageError(Exception):
    """The command line contradicts itself in a way that argparse cannot express; ends as a usage error."""
