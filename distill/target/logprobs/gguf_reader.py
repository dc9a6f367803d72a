"""A GGUF target's own distributions: those of the quantised weights that will be served, read by llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from distill.errors import DataError, PairError
from distill.files import reference_digest
from distill.models.gguf.model import GgufModel
from distill.models.metadata import VocabularyMetadata
from distill.packing import Packed
from distill.recipe import GgufOptions
from distill.recipe.gguf import CHANGES_LOGITS
from distill.target.logprobs.entries import ROWS, Entries, entries_of, scored_documents


def require_gguf(path: str, target: str, block: int) -> str:
    """A line about a GGUF file that holds the target; loads no weights.

    Raises PairError where an id is not the same token as in the target's tokenizer, DataError for a file that cannot be
    read or whose context is shorter than a block.
    """
    if not path.endswith(".gguf"):
        raise DataError(f"teacher.gguf: {path} is not the name of a GGUF file", "give a file that ends in .gguf")
    ours, theirs = VocabularyMetadata.read(target), VocabularyMetadata.read(path)
    rows = range(max(ours.rows, theirs.rows))
    differing = [index for index in rows if ours.real(index) != theirs.real(index)]
    if differing:
        index = differing[0]
        shown = [
            repr(token[:40]) if token is not None else "no token" for token in (theirs.real(index), ours.real(index))
        ]
        raise PairError(
            f"teacher.gguf: {path} has another vocabulary than the target {target}: token {index} is {shown[0]} there "
            f"and {shown[1]} in the target's tokenizer ({len(differing)} ids differ)",
            "give the target's own GGUF file, or the target.model that this file was made from",
        )
    if theirs.context is not None and theirs.context < block:
        raise DataError(f"corpus.block is {block}, the context of {path} {theirs.context}", "lower corpus.block")
    return f"teacher: {path}, {theirs.architecture}, has the target's {theirs.real_tokens} tokens"


class GgufReader:
    """A GGUF file that reads each document on its own, in pieces, with the logits of one piece in memory at a time.

    llama.cpp computes a lone token with other kernels than several; `pad_single` makes the stored numbers independent
    of how a document falls into pieces (see GgufModel). Loads the weights.
    """

    def __init__(self, path: str, target: str, block: int, vocabulary: int, options: GgufOptions) -> None:
        require_gguf(path, target, block)
        self.vocabulary = vocabulary
        capacity = max(block, 2)
        self.model = GgufModel(path, context=capacity, batch=min(ROWS, capacity), pad_single=True, options=options)
        self.origin: dict[str, Any] = {"kind": "gguf", "path": str(Path(path)), "digest": reference_digest(path)}
        changing = {name: value for name, value in options.given().items() if name in CHANGES_LOGITS}
        if changing:
            self.origin["options"] = changing

    def __call__(self, blocks: Packed, k: int, temperatures: tuple[float, ...]) -> Entries:
        """See `Reader`."""
        return entries_of(self._rows(blocks), k, self.vocabulary, temperatures)

    def _rows(self, blocks: Packed) -> Iterator[Tensor]:
        """Logits [c, V] of the scored positions; valid until the next are asked for."""
        for document in scored_documents(blocks):
            self.model.reset()
            ids = document.ids[: document.scored[-1] + 1]  # the token after the last scored position is not read
            for start in range(0, len(ids), ROWS):
                piece = ids[start : start + ROWS]
                want = [position - start for position in document.scored if start <= position < start + len(piece)]
                logits = self.model.extend(piece, want=want)
                if want:
                    yield logits.full()

    def close(self) -> None:
        """Free the weights."""
        self.model.close()
