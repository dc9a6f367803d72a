"""The target's likeliest tokens at scored positions, which a compact store holds, of a model in transformers or of the
quantised weights that will be served, read by llama.cpp.

Legend: n blocks, S positions, N scored positions, c of them at once, V vocabulary, K entries, M temperatures.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from distill.errors import DataError
from distill.files import reference_digest
from distill.models.gguf.model import GgufModel
from distill.models.packed_forward import packed_inputs
from distill.packing import Packed, scored_documents
from distill.recipe import GgufOptions
from distill.recipe.gguf import CHANGES_LOGITS
from distill.target.writers.local import require_gguf
from distill.teacher.store import compress, log_tail_at

ROWS = 512  # positions whose logits are read at once
CACHED = 2**20  # cells of logits, 4 MB


@dataclass(frozen=True)
class Entries:
    """ids int32 [N, K], log_probabilities [N, K] at temperature 1, log_tails [N, M], on the CPU."""

    ids: Tensor
    log_probabilities: Tensor
    log_tails: Tensor

    @classmethod
    def join(cls, parts: list[Entries], k: int, temperatures: int) -> Entries:
        """The parts one after the other; without any, entries of no position."""
        none = cls(torch.empty(0, k, dtype=torch.int32), torch.empty(0, k), torch.empty(0, temperatures))
        return cls(*(torch.cat([getattr(part, one.name) for part in parts or [none]]) for one in fields(cls)))


class Reader(Protocol):
    """A target that gives its distributions on packed blocks; `origin` goes into the store's manifest."""

    origin: dict[str, Any]

    def __call__(self, blocks: Packed, k: int, temperatures: tuple[float, ...]) -> Entries:
        """The k likeliest tokens at the scored positions of some blocks, block by block."""
        ...

    def close(self) -> None:
        """Free what llama.cpp holds, or end the connections."""
        ...


def entries_of(rows: Iterable[Tensor], k: int, vocabulary: int, temperatures: tuple[float, ...]) -> Entries:
    """The entries of distributions given as logits [c, V], part by part."""
    parts = []
    for part in rows:
        # A processor takes pieces that its cache holds, several times quicker.
        size = CACHED // part.shape[-1] if part.device.type == "cpu" else len(part)
        for logits in part.split(max(1, size)):
            chunk = compress(logits, k, vocabulary)
            assert chunk.ids is not None
            tails = [
                chunk.log_tail if value == 1 else log_tail_at(logits, chunk.ids, value, vocabulary)
                for value in temperatures
            ]
            parts.append(Entries(chunk.ids.cpu(), chunk.log_probabilities.cpu(), torch.stack(tails, -1).cpu()))
    return Entries.join(parts, k, len(temperatures))


class ModelReader:
    """A loaded model of transformers; the first `vocabulary` rows of its head are tokens."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.origin: dict[str, Any] = {"kind": "model"}

    @torch.inference_mode()
    def __call__(self, blocks: Packed, k: int, temperatures: tuple[float, ...]) -> Entries:
        """See `Reader`."""
        logits = self.model(**packed_inputs(self.model, blocks)).logits.flatten(0, 1)  # [n·S, V]
        scored = blocks.mask.flatten().nonzero().squeeze(-1).to(logits.device)
        return entries_of((logits[rows] for rows in scored.split(ROWS)), k, self.vocabulary, temperatures)

    def close(self) -> None:
        """Nothing to free: the model goes with its last reference."""


def compact_distributions(reader: Reader, blocks: Packed, k: int, temperatures: tuple[float, ...]) -> dict[str, Tensor]:
    """top_ids, top_log_probabilities [n, S, K] and log_tails [n, S, M]; zeros where the mask scores nothing."""
    entries = reader(blocks, k, temperatures)
    shape = blocks.mask.shape
    top_ids = torch.zeros(*shape, k, dtype=torch.int32)
    logs = torch.zeros(*shape, k, dtype=torch.float16)
    tails = torch.zeros(*shape, len(temperatures))
    top_ids[blocks.mask], logs[blocks.mask] = entries.ids, entries.log_probabilities.half()
    tails[blocks.mask] = entries.log_tails
    return {"top_ids": top_ids, "top_log_probabilities": logs, "log_tails": tails}


def mean_masses(reader: Reader, blocks: Packed, k: int) -> Tensor:
    """The mass [K] of the 1, 2, … likeliest tokens, the mean over the scored positions of some blocks, in fp64."""
    logs = reader(blocks, k, (1.0,)).log_probabilities
    return logs.double().exp().cumsum(-1).sum(0) / max(1, len(logs))


@dataclass(frozen=True)
class Document:
    """One packed document with scored positions: its ids up to the last of them and the token after that, which
    positions are scored, its block and its number there."""

    ids: list[int]
    scored: list[int]
    block: int = 0
    number: int = 0


def listed_documents(blocks: Packed) -> list[Document]:
    """The documents of some blocks that have scored positions, in the order in which a mask lists those."""
    listed = []
    for block, number, here in scored_documents(blocks):
        own = blocks.documents[block] == number
        scored = here[own].nonzero().squeeze(-1).tolist()
        listed.append(Document(blocks.ids[block][own][: scored[-1] + 2].tolist(), scored, block, number))
    return listed


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
        for document in listed_documents(blocks):
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
