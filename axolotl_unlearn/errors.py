"""The one exception that users of axolotl-unlearn meet."""


class UnlearnError(ValueError):
    """A fault in what the user gave: one sentence naming file, row or key, and the cure.

    The command line prints it as ``Error: ...`` and exits with code 2.
    """
