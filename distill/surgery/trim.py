"""The tokens that a trimmed draft keeps: those the target writes, and those that every text may need.

Legend: V vocabulary, K kept tokens. A domain is one source of the corpus; its counts [V] are of target-written tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy
import torch
from numpy.typing import NDArray

from distill.data.texts import Answer
from distill.devices import doubled
from distill.errors import DataError, RecipeError
from distill.teacher.store import TeacherSource
from distill.vocabulary.vocabulary import Vocabulary

EXPECTED_AT = 16_384  # positions: about ten seconds on two cores for a head of 49,152 × 576
CHUNK = 256
MULTIPLE = 256  # sizes that suit matrix products and GGUF's block types

Counts = NDArray[numpy.int64]
Shares = NDArray[numpy.float64]


def count_tokens(answers: Sequence[Answer], vocabulary: int) -> dict[str, Counts]:
    """Counts [V] of the tokens that the target wrote, by domain; DataError where it wrote none."""
    tokens: dict[str, list[int]] = {}
    for answer in answers:
        tokens.setdefault(answer.source or "answers", []).extend(answer.answer)
    counts = {domain: numpy.bincount(ids, minlength=vocabulary) for domain, ids in tokens.items() if ids}
    if not counts:
        raise DataError("there are no target-written tokens to count", "raise answers.prompts, or leave cut.trim out")
    return counts


def always_kept(vocabulary: Vocabulary) -> list[int]:
    """Ids kept whatever their counts: special and added tokens, the 256 bytes, numbers and runs of white space."""

    def needed(kind: str, content: bytes | None) -> bool:
        if kind in ("special", "added", "byte"):
            return True
        return content is not None and (len(content) == 1 or not content.strip() or content.strip().isdigit())

    return [i for i, content in enumerate(vocabulary.bytes_of) if needed(vocabulary.kinds[i], content)]


def expected_shares(teacher: TeacherSource, device: torch.device, positions: int = EXPECTED_AT) -> Shares:
    """The mean of the stored distributions at temperature 1 [V], at about so many positions, evenly spread.

    A token that few answers would hold has its share here before it was ever written. Entries that a compact store
    does not name have none.
    """
    scored = teacher.packed.mask.sum(-1)
    step = max(1, math.ceil(int(scored.sum()) / positions))
    total = torch.zeros(teacher.vocabulary, dtype=torch.float64)
    count = 0
    for block in range(0, teacher.blocks, step):
        if not scored[block]:
            continue
        own = teacher.teacher(torch.tensor([block]), device)
        for first in range(0, len(own), CHUNK):
            chunk = own.chunk(slice(first, min(first + CHUNK, len(own))))
            values = doubled(chunk.log_probabilities.exp()).cpu()
            if chunk.ids is None:
                total += values.sum(0)
            else:
                total.scatter_add_(0, chunk.ids.long().cpu().flatten(), values.flatten())
        count += len(own)
    return (total / max(1, count)).numpy()


def rank_tokens(counts: Mapping[str, Counts], forced: Sequence[int], expected: Shares | None = None) -> list[int]:
    """Ids in the order in which they are kept: the forced ones, then by their largest share in any domain, to which
    their `expected` share is added."""
    shares = numpy.max([column / column.sum() for column in counts.values()], axis=0)
    if expected is not None:
        shares = shares + expected
    shares[list(forced)] = numpy.inf
    # Stable: of equal shares the smaller id, an earlier merge of byte pairs, comes first.
    order: list[int] = numpy.argsort(-shares, kind="stable").tolist()
    return order


def keep(counts: Mapping[str, Counts], order: Sequence[int], size: int) -> tuple[list[int], dict[str, float]]:
    """The first `size` ids of the order, ascending, and the share of each domain's tokens that they hold."""
    ids = sorted(order[:size])
    return ids, {domain: float(column[ids].sum() / column.sum()) for domain, column in counts.items()}


def smallest_size(counts: Mapping[str, Counts], order: Sequence[int], forced: int, mass: float) -> int:
    """The smallest multiple of 256 (or the whole vocabulary) that holds `mass` of every domain and all forced ids."""
    reached = numpy.min([numpy.cumsum(column[list(order)]) / column.sum() for column in counts.values()], axis=0)
    enough = int(numpy.searchsorted(reached, mass - 1e-12)) + 1
    size = -(-max(enough, forced) // MULTIPLE) * MULTIPLE
    return min(size, len(order))


def sizes_between(smallest: int, largest: int) -> list[int]:
    """Sizes that a price search tries: multiples of 256 from `smallest`, each a quarter larger, and `largest`."""
    sizes = []
    size = -(-smallest // MULTIPLE) * MULTIPLE
    while size < largest:
        sizes.append(size)
        size = -(-int(size * 1.25) // MULTIPLE) * MULTIPLE
    return [*sizes, largest]


def check_size(size: int | None, forced: int, vocabulary: int, stored: int) -> None:
    """Raise RecipeError for an impossible size."""
    least = max(forced, stored + 1)
    if size is not None and (size % MULTIPLE or not least <= size <= vocabulary):
        low = -(-least // MULTIPLE) * MULTIPLE
        raise RecipeError(
            f"cut.trim.size is {size}; it must be a multiple of {MULTIPLE}, at least the {forced} tokens that are "
            f"always kept, more than the teacher's top {stored}, and at most the vocabulary's {vocabulary}",
            f"ask for {low} to {vocabulary // MULTIPLE * MULTIPLE}",
        )
