"""The one exception a user's mistake or a faulty file raises."""

from __future__ import annotations


class CircuitsError(ValueError):
    """What is wrong, in which file or tensor, and what to do: one or two sentences, no traceback on the command line.

    Everything that the user can mend (a missing file, a shape that contradicts the config, a head out of range)
    raises this. Any other exception that leaves the package is a fault of the package.
    """
