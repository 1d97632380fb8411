"""The exceptions that a user is meant to see."""


class TercelError(Exception):
    """What was wrong, where, and what to do, in one sentence; the CLI prints it and exits with code 2."""


class NoRoomError(TercelError):
    """A disk has no room for what was to be written on it, and nothing of it was; whoever can do without goes on."""
