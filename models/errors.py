"""Defines the base class of all errors that a user can mend; all layers import it, so it imports nothing."""


class UserError(RuntimeError):
    """What went wrong is for whoever runs the program to mend; the text is one line that says how."""
