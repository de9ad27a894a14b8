"""Usage errors that argparse cannot detect."""


class UsageError(Exception):
    """The command line contradicts itself in a way that argparse cannot express; ends as a usage error."""
