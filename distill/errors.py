"""Errors that a user can correct: one message with the fault, its place and the next step."""

from __future__ import annotations

import re

MOST_CHARACTERS = 3000  # of a message: it may quote a foreign file
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """A text as a terminal can show it: control characters and lone surrogates are written as escapes; cut if long."""
    shown = _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]}…"


class DistillError(Exception):
    """A fault outside our code; the command line prints it without a traceback and exits with 2.

    What the message quotes of a file or an option is made printable here, for all of them.
    """

    def __init__(self, what: str, hint: str | None = None) -> None:
        what, hint = printable(what), None if hint is None else printable(hint)
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


class ServingError(DistillError):
    """A server under test did not start, stopped, refused, or does not draft."""
