"""What a user can mend: one message that says what is wrong, where, and what to do next."""

from __future__ import annotations


class DistillError(Exception):
    """A mistake or fault outside our code; the command line prints it without a traceback and exits with 2."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what}\n  {self.hint}" if self.hint else self.what


class RecipeError(DistillError):
    """The recipe, an override or an option cannot be used as written."""


class PairError(DistillError):
    """Target and draft (or donor) do not fit each other."""


class DataError(DistillError):
    """A model, tokenizer, corpus or artifact on disk is missing, empty, damaged or of an unknown kind."""


class RunError(DistillError):
    """The run directory cannot be written, is busy, or holds work that a command would supersede."""


class EndpointError(DistillError):
    """A server that was asked for the target's text did not answer as needed."""
