"""Errors that a user can correct: one message with the fault, its place and the next step."""

from __future__ import annotations


class DistillError(Exception):
    """A fault outside our code; the command line prints it without a traceback and exits with 2."""

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
    """The run directory cannot be written, is in use, or holds work that a command would supersede."""


class EndpointError(DistillError):
    """A server did not return the target's text or distributions as requested."""
