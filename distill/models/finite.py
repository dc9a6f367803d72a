"""Logits that are not finite: one check and one message, which names the model and the position.

Logits of −∞ are legal (trimmed heads, grammars) as long as a row has a larger one. NaN counts as the largest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from distill.errors import DataError

Place = Callable[[int], str]  # from a row of logits: the model and the position that they belong to


def place_of(model: str, lengths: Sequence[int]) -> Place:
    """The places of rows that a model computed after so many tokens each."""
    return lambda row: f"{model} after {lengths[row]} tokens"


def finite_argmax(ids: list[int], largest: list[float], place: Place | None, empty: int | None) -> list[int]:
    """The ids of the rows' largest logits, `empty` for those that are −∞ everywhere; DataError as `require_finite`."""
    require_finite(largest, place, empty is not None)
    if empty is None:
        return ids
    return [token if value > -math.inf else empty for token, value in zip(ids, largest, strict=True)]


def require_finite(largest: Iterable[float], place: Place | None = None, empty: bool = False) -> None:
    """Raise DataError unless the largest logit of each row is finite; −∞ is allowed with `empty`."""
    for row, value in enumerate(largest):
        if -math.inf < value < math.inf or (empty and value == -math.inf):
            continue
        where = "a model" if place is None else place(row)
        if value == -math.inf:
            raise DataError(
                f"no token can follow: the logits of {where} are -inf everywhere",
                "a trimmed head or a grammar leaves no token that the model has: allow more tokens",
            )
        raise DataError(
            f"the logits of {where} are not finite: the largest is {value}",
            "the weights are damaged or their type overflows: get the model again, or load it in float32",
        )
