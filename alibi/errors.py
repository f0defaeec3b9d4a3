"""The error that entry points print as one line."""


class UserError(RuntimeError):
    """Something that the user can mend: the message says what, got, needed and how to fix it."""
