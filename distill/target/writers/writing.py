"""The protocol of a writer, and the check of a GGUF file that stands for the target."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Protocol

from distill.errors import DataError, PairError
from distill.models.metadata import VocabularyMetadata
from distill.models.pairs import compare_pair
from distill.texts import Reply, Request


class Writer(Protocol):
    """Continues prompts as the target does.

    `by_prompt`: a reply does not depend on other requests, so each is kept as it comes. Else requests that are written
    together affect each other through rounding, and a group is written whole.
    """

    by_prompt: bool

    def write(self, waiting: deque[Request]) -> Generator[Reply, None, None]:
        """A reply to each request, in any order; requests appended to `waiting` between replies are answered too."""
        ...

    def close(self) -> list[str]:
        """Free models and connections; lines about what went wrong and was mended."""
        ...


def require_gguf(target: str, path: str, setting: str) -> VocabularyMetadata:
    """What a GGUF file, which a recipe's `setting` names, says of its vocabulary; loads no weights.

    Raises DataError for a file that cannot be read, PairError where an id is not the same token as in the target's
    tokenizer.
    """
    if not Path(path).is_file():
        raise DataError(f"{setting}: there is no file {path}", "export the target with distill export-gguf")
    pair = compare_pair(target, path)
    if pair.distill is not None:
        raise PairError(
            f"{setting}: {path} has other tokens than {target}: {pair.distill}",
            "give a GGUF file of the same target, or set target.model to the model that it was made from",
        )
    return pair.draft
