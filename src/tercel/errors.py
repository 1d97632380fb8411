"""The one exception a user is meant to see."""


class TercelError(Exception):
    """What was wrong, where, and what to do, in one sentence; the CLI prints it and exits with code 2."""
