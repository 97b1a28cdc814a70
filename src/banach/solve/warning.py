"""Warnings about solves that missed their tolerance. Their texts are constant; numbers are in the results."""


class ConvergenceWarning(UserWarning):
    """A forward solve ended above its tolerance."""


class AdjointWarning(UserWarning):
    """The linear solve of `Implicit` ended above its tolerance."""
