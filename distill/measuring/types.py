"""Which library and type of file run a GGUF target fastest on this machine: costs of steps, and the KL of each to the
file's own distributions.

Legend: T(m) seconds of a step of m tokens.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distill.decoding.costs import measure_steps
from distill.engines.llama_cpp.model import GgufModel
from distill.errors import DataError
from distill.gguf.importing import file_type, folder_of
from distill.gguf.writer import export_gguf
from distill.measuring.identity import OwnDistributions
from distill.progress import note
from distill.recipe import GgufOptions
from distill.tables import Cell, Row, Table

SIZES = (1, 2, 3, 4, 6, 8)
DEPTH, PROMPT, NEW = 128, 128, 128  # tokens in the cache; of the request that is priced
CONTEXT = 512
TEXTS = (
    "The history of the bicycle begins in the nineteenth century, when",
    "def read_lines(path):\n    ",
    "Dear Ms Weber,\n\nthank you for your letter of 3 May. ",
    "Question: A train leaves at 8:15 and arrives at 11:40. How long does it take?\nAnswer:",
)


@dataclass(frozen=True)
class TypeFigures:
    """One library and type: the KL in nats from the file's own distributions (0 for itself), the seconds of a prompt of
    128 tokens and T(m) by m behind it."""

    library: str
    type: str
    kl: float
    prompt_seconds: float
    steps: dict[int, float]

    @property
    def request_rate(self) -> float:
        """Tokens per second of a whole request, decoded plainly."""
        return NEW / (self.prompt_seconds + NEW * self.steps[1])


@dataclass(frozen=True)
class TypesReport:
    """The rows of the table, the file itself in llama.cpp first; `most_kl` is the KL that is accepted."""

    command: str
    machine: dict[str, Any]
    most_kl: float
    figures: list[TypeFigures]


def compare_types(path: Path, types: Sequence[str], threads: int | None, repeats: int) -> list[TypeFigures]:
    """The file itself and its weights in other types, in every library that is installed; its own in llama.cpp first.

    Files of other types are written to a temporary folder and removed. A library that does not open one, or computes
    batches of it wrongly, is left out with a message; DataError where llama.cpp does not open the file itself.
    """
    libraries = ["llama.cpp", *(["ik"] if importlib.util.find_spec("ik_llama_cpp") else [])]
    own, figures = file_type(path), list[TypeFigures]()
    reference: OwnDistributions | None = None
    with tempfile.TemporaryDirectory() as scratch:
        for kind in dict.fromkeys([own, *types]):
            place = path
            if kind != own:
                place = Path(scratch) / f"{kind}.gguf"
                export_gguf(folder_of(str(path)), place, kind)
            for library in libraries:
                note(f"{library}, {kind}")
                options = GgufOptions.model_validate({"library": library})
                try:
                    opened = GgufModel(place, context=CONTEXT, threads=threads, options=options)
                except DataError as error:
                    if not figures:
                        raise
                    note(f"{library}, {kind}: left out: {error.what}")
                    continue
                with opened as model:
                    texts = [[*model.opening, *model.tokenize(text)] for text in TEXTS]
                    reference = reference or OwnDistributions(model, texts)
                    kl = reference.kl(model) if figures else 0.0
                    title = kind if kind == own else f"{kind} (from {own})"
                    steps = measure_steps(model, SIZES, DEPTH, repeats, model.vocabulary_size)
                    medians = {m: seconds[0] for m, seconds in steps.items()}
                    figures.append(TypeFigures(library, title, kl, _prompt_seconds(model, repeats), medians))
            if place != path:
                place.unlink()
    return figures


def _prompt_seconds(model: GgufModel, repeats: int) -> float:
    """The least seconds that a prompt of 128 tokens took."""
    ids = [7 * index % model.vocabulary_size for index in range(PROMPT)]
    taken = []
    for _ in range(repeats):
        model.rollback([0])
        started = time.perf_counter()
        model.extend(ids, want=[PROMPT - 1]).argmax()
        taken.append(time.perf_counter() - started)
    return min(taken)


def types_table(report: TypesReport) -> Table:
    """A row for each library and type."""
    rows: list[Row] = [
        [
            one.library,
            one.type,
            Cell(one.kl, ".4f"),
            PROMPT / one.prompt_seconds,
            1 / one.steps[1],
            *(Cell(one.steps[m] / one.steps[1], ".2f") for m in SIZES[1:]),
            one.request_rate,
        ]
        for one in report.figures
    ]
    heads = ["library", "type", "KL", "prompt tokens/s", "plain tokens/s", *(f"T({m})/T(1)" for m in SIZES[1:])]
    text = (
        f"KL: mean nats from the file's own distributions. Request: {PROMPT} tokens of prompt, {NEW} new ones, plain."
    )
    return Table([*heads, "request tokens/s"], rows, report.command, "libraries and types", text)


def recommend(report: TypesReport) -> str:
    """The fastest of those whose KL is accepted, and what verifying costs there."""
    own = report.figures[0]
    best = max((one for one in report.figures if one.kl <= report.most_kl), key=lambda one: one.request_rate)
    sentence = f"Fastest at a KL of at most {report.most_kl:g}: {best.library}, {best.type}"
    if best is own:
        return f"{sentence}, which is the file as it is."
    gain, (there, here) = best.request_rate / own.request_rate, (one.steps[4] / one.steps[1] for one in (best, own))
    return (
        f"{sentence}: {gain:.2f}× the request in {own.library}, {own.type}; verifying 4 tokens costs {there:.2f} steps "
        f"there, {here:.2f} in the latter."
    )
