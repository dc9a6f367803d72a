"""Rounds of a fixed length, told from greedy rounds that drafted more.

A greedy draft continues an accepted text as it did before, so that a round which begins inside an accepted stretch is
known: it accepts what is left of the stretch. Acceptance by position is not the same for all lengths: short rounds
begin more often inside such stretches, long ones behind a token that the draft did not know.

Legend: n tokens drafted in a round.
"""

from __future__ import annotations

from collections.abc import Sequence


def shorter_rounds(rounds: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """The rounds (drafted, accepted) of `length` tokens of a text whose greedy rounds, in order, are given.

    Where all that was drafted is accepted, nothing is known of the token behind it: such a round is taken to have
    drafted no more, which says nothing of later positions (see `paid.accepted_by_position`).
    """
    left: list[tuple[int, bool]] = []  # by place in the text: tokens of the stretch after it; whether a miss ends it
    for drafted, accepted in rounds:
        left += [(accepted - passed, accepted < drafted) for passed in range(accepted + 1)]
    found, place = [], 0
    while place < len(left):
        stretch, missed = left[place]
        if missed or stretch >= length:
            found.append((length, min(stretch, length)))
            place += min(stretch, length) + 1
        else:
            found.append((stretch, stretch))
            place += stretch + 1
    return found
