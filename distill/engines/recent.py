"""A draft that reads only the last tokens of a text, in any engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from distill.engines.model import AroundModel, Ints, Logits, Model, check_chain, check_lengths


class RecentContext(AroundModel):
    """A model that holds at most the last `most` tokens of its text; chains only.

    Where more would be held, it begins anew with the last half of them, which counts positions from 0 again. So texts
    may be longer than its context, and of a long prompt it reads the end alone. ValueError where `most` is below 2.
    """

    def __init__(self, model: Model, most: int) -> None:
        super().__init__(model)
        if most < 2:
            raise ValueError(f"a draft that reads recent tokens needs two of them, got {most}")
        self.most = min(most, model.capacity)
        self.max_leaves, self.capacity = 0, sys.maxsize
        self._begin = 0  # the first token of the text that is held

    def extend(
        self, tokens: Ints, counts: Ints | None = None, parents: Ints | None = None, want: Ints | None = None
    ) -> Logits:
        """Append `tokens`; logits for those in `want` (None: all), which must lie within the last `most`.

        Raises as `check_chain`, and ValueError for a tree.
        """
        if parents is not None:
            raise ValueError("a draft that reads recent tokens makes chains, not trees")
        check_chain(tokens, counts, want, self.lengths, self.capacity, self.vocabulary_size)
        wanted = list(range(len(tokens)) if want is None else want)
        held, size = self.model.lengths[0], len(self.text) + len(tokens)
        if held < len(self.text) - self._begin or held + len(tokens) > self.most:
            needed = len(tokens) - min(wanted, default=len(tokens) - 1)
            if needed > self.most:
                raise ValueError(f"logits of the last {needed} tokens are wanted, and {self.most} are read")
            self.model.rollback([0])
            self._begin = max(0, size - max(self.most // 2, needed))
            fresh = [*self.text[self._begin :], *tokens[max(self._begin - len(self.text), 0) :]]
            first = len(fresh) - len(tokens)
            logits = self.model.extend(fresh, want=[first + index for index in wanted])
        else:
            logits = self.model.extend(tokens, want=wanted)
        self.text.extend(tokens)
        return logits

    def rollback(self, lengths: Sequence[int]) -> None:
        """Forget the tokens after the first `lengths[0]`; before those that are held, the next call reads again."""
        (length,) = check_lengths(lengths, self.lengths)
        del self.text[length:]
        left = length - self._begin
        if left <= 0:
            left = self._begin = 0
        self.model.rollback([min(left, self.model.lengths[0])])
