"""A GGUF target's own distributions: those of the quantised weights that will be served, read by llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from distill.errors import DataError
from distill.files import reference_digest
from distill.models.gguf.model import GgufModel
from distill.packing import Packed
from distill.recipe import GgufOptions
from distill.recipe.gguf import CHANGES_LOGITS
from distill.target.logprobs.entries import ROWS, Entries, entries_of, scored_documents
from distill.target.writers.writing import require_gguf


def require_teacher_file(path: str, target: str, block: int) -> str:
    """A line about the teacher's GGUF file; raises as `require_gguf`, and DataError for a context shorter than a
    block."""
    if not path.endswith(".gguf"):
        raise DataError(f"teacher.gguf: {path} is not the name of a GGUF file", "give a file that ends in .gguf")
    found = require_gguf(target, path, "teacher.gguf")
    if found.context is not None and found.context < block:
        raise DataError(f"corpus.block is {block}, the context of {path} {found.context}", "lower corpus.block")
    return f"teacher: {path}, {found.architecture}, has the target's {found.real_tokens} tokens"


class GgufReader:
    """A GGUF file that reads each document on its own, in pieces, with the logits of one piece in memory at a time.

    llama.cpp computes a lone token with other kernels than several; `pad_single` makes the stored numbers independent
    of how a document falls into pieces (see GgufModel). Loads the weights.
    """

    def __init__(self, path: str, target: str, block: int, vocabulary: int, options: GgufOptions) -> None:
        require_teacher_file(path, target, block)
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
