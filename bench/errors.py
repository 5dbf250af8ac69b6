"""The one kind of error that is the user's to mend."""


class UserError(ValueError):
    """One sentence naming what was found, where, and what is allowed; the command line exits with 2."""
