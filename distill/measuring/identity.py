"""Whether a text, or a distribution, is the target's: greedy speculative text is the plain one but where rounding
explains a first difference; the target in another engine or type of file has a KL to its own distributions.

Legend: T(m) seconds of a step of m tokens.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from distill.data.samples import first_difference
from distill.decoding.costs import ENOUGH, measure_steps, predicted_speedups
from distill.divergences import forward_kl
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import growing_decoder, load_in_bits
from distill.engines.model import ROOT, Model
from distill.engines.torch.exact import exact_logits
from distill.engines.torch.hugging_face import encode_text, load_tokenizer, local_folder
from distill.engines.torch.model import TorchModel
from distill.engines.torch.packed import SOURCE, load_packed
from distill.errors import DataError
from distill.files import cache_folder, digest, file_digests, is_gguf, read_result, remember
from distill.gguf.importing import file_type
from distill.gguf.writer import export_files
from distill.machine import machine, thread_count, version_of
from distill.progress import Progress, note
from distill.recipe import Configuration, GgufOptions, Target
from distill.tables import Cell, Row, Table

TORCH_NOISE = 1e-4  # fp32: logit gaps below this are rounding ties


@dataclass(frozen=True)
class Rounding:
    """How far rounding moves a target's logits: two within `noise` are tied. In a type that rounds coarsely, a tie is
    also read in steps of as many tokens as each of `sizes`, with `trees` also as paths through trees; see `ties`."""

    noise: float
    sizes: tuple[int, ...] = ()
    trees: bool = False


@dataclass
class Identity:
    """How many texts are the plain one, differ from it first at a rounding tie (`excused`), or differ otherwise."""

    identical: int = 0
    excused: int = 0
    different: int = 0


def judged(
    target: Model, prompt: Sequence[int], plain: Sequence[int], others: Sequence[Sequence[int]], rounding: Rounding
) -> list[str]:
    """How each text of `others` stands to the `plain` one: a field of Identity."""
    first = [first_difference(plain, other) for other in others]
    differing = [(other, where) for other, where in zip(others, first, strict=True) if where is not None]
    tied = iter(ties(target, prompt, plain, differing, rounding))
    return ["identical" if where is None else "excused" if next(tied) else "different" for where in first]


def rounding_noise(model: Model, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Largest absolute logit difference between taking `tokens` one at a time and all at once, after `prompt`."""
    model.rollback([0])
    model.extend(prompt, want=[len(prompt) - 1])
    together = model.extend(tokens).full()
    model.rollback([len(prompt)])
    largest = 0.0
    for index, token in enumerate(tokens):
        largest = max(largest, float((model.extend([token]).full()[0] - together[index]).abs().max()))
    return largest


def top_gap(model: Model, context: Sequence[int]) -> float:
    """Difference of the two largest logits after `context`; DataError where they are not finite."""
    model.rollback([0])
    logits = model.extend(context, want=[len(context) - 1])
    logits.argmax()  # refuses NaN and infinity, of which no gap can be told
    best, second = logits.full()[0].topk(2).values.tolist()
    return float(best - second)


def ties(
    target: Model,
    prompt: Sequence[int],
    text: Sequence[int],
    others: Sequence[tuple[Sequence[int], int]],
    rounding: Rounding,
) -> list[bool]:
    """For each of `others`, a text and where it first differs from the plain `text`: whether rounding alone may do so.

    It may where the target's two best logits lie within the noise. In a type that rounds coarsely the logits depend on
    how many tokens are taken at once, all along the text, because the cache keeps the differences. For such a type the
    distance of the two tokens' logits is read with the text taken one token at a time, and in steps of each size; its
    spread is the rounding. Behind trees the cache may hold the text in another order, which rounds otherwise again. The
    text is read once for all others, by sizes in turn, until each of them is decided.
    """
    gaps = {where: top_gap(target, [*prompt, *text[:where]]) for where in sorted({where for _, where in others})}
    tied = [gaps[where] <= rounding.noise for _, where in others]
    apart: dict[int, list[float]] = {
        number: []
        for number, (other, where) in enumerate(others)
        if rounding.sizes and not tied[number] and where < min(len(text), len(other))
    }
    ways = [(size, False) for size in (1, *rounding.sizes)]
    ways += [(size, True) for size in rounding.sizes if rounding.trees]
    for size, tree in ways:
        if not apart:
            break
        logits = _logits_along(target, prompt, text, size, {others[number][1] for number in apart}, tree)
        for number, distances in list(apart.items()):
            other, where = others[number]
            row = logits[where]
            distances.append(float(row[text[where]] - row[other[where]]))
            tied[number] = 0 <= distances[0] <= max(distances) - min(distances)
            if tied[number] or distances[0] < 0:  # the spread can only grow
                del apart[number]
    return tied


def _logits_along(
    target: Model, prompt: Sequence[int], text: Sequence[int], size: int, places: Collection[int], tree: bool
) -> dict[int, Tensor]:
    """The logits [V] before the text's tokens at these places, the text read in steps of `size` tokens.

    As a `tree`, each step has another node behind its first token, which is then dropped.
    """
    ids, found = [*prompt, *text], dict[int, Tensor]()
    asked = {len(prompt) + place - 1: place for place in places}
    # Plain decoding reads the whole prompt at once; a round reads its last token with the drafted ones.
    begin = len(prompt) - (size > 1)
    target.rollback([0])
    if begin and asked:
        logits = target.extend(ids[:begin], want=[begin - 1]).full()
        if begin - 1 in asked:
            found[asked[begin - 1]] = logits[0]
    for start in range(begin, max(asked, default=-1) + 1, size):
        piece = ids[start : start + size]
        wanted = [at for at in range(start, start + len(piece)) if at in asked]
        rows = [at - start for at in wanted] or [len(piece) - 1]
        if tree and len(piece) > 1 and target.capacity - start > len(piece):
            path = [0, *range(2, len(piece) + 1)]
            nodes = [piece[0], piece[0], *piece[1:]]
            logits = target.extend(nodes, parents=[ROOT, 0, *path[:-1]], want=[path[row] for row in rows]).full()
            target.keep([path])
        else:
            logits = target.extend(piece, want=rows).full()
        found |= {asked[at]: row for at, row in zip(wanted, logits, strict=False)}
    return found


def measured_rounding(
    settings: Target,
    backend: str,
    target: Model,
    prompt: Sequence[int],
    text: Sequence[int],
    configurations: Sequence[Configuration],
) -> Rounding:
    """The rounding of a target. In fp32 it is agreed; in other types it is measured on the plain `text` behind a
    prompt, in pieces as long as the longest rounds of the greedy configurations: of a tree its nodes, of a lookup
    before it its length. Ties are then read in steps of these sizes, and of every size up to the longest fixed length;
    where trees are drafted also as paths through trees, where the target takes them.
    """
    if backend == "pytorch" and settings.dtype == "float32" and settings.quantise is None:
        return Rounding(TORCH_NOISE)
    greedy = [one for one in configurations if one.sampler == "greedy"]
    drafted = {size for one in greedy for size in (one.most_nodes, 0 if one.drafter == "tree" else one.longest)}
    chains = [one.longest for one in greedy if one.drafter == "draft" and one.length_rule == "fixed"]
    pieces = [text[start : start + length + 1] for length in sorted(drafted - {0}) for start in (0, 16)]
    # A text may end before the longest length.
    noise = max((rounding_noise(target, prompt, piece) for piece in pieces if len(piece) > 1), default=0.0)
    sizes = {*range(2, max(chains, default=0) + 2), *(length + 1 for length in drafted - {0})}
    trees = any(one.most_nodes for one in configurations) and target.max_leaves > 1
    return Rounding(noise, tuple(sorted(sizes)), trees)


# ── How far the same target in another engine or type of file is from its own distributions ──

COMPARED = 4, 64  # prompts, and tokens after each
READ = 16  # tokens at once: the KL is that of single tokens within a fiftieth, in a fifth of the time


class OwnDistributions:
    """What the target itself says in greedy texts of its own, by which other engines and files are judged."""

    def __init__(self, target: Model, prompts: Sequence[Sequence[int]]) -> None:
        count, tokens = COMPARED
        self.texts: list[tuple[list[int], list[int], Tensor]] = []
        for prompt in prompts[:count]:
            target.rollback([0])
            ids, rows = list(prompt), list[Tensor]()
            for _ in range(min(tokens, target.capacity - len(prompt))):
                logits = target.extend(ids[target.lengths[0] :], want=[len(ids) - target.lengths[0] - 1])
                ids += logits.argmax()
                rows.append(logits.full()[0])
            self.texts.append((list(prompt), ids[len(prompt) :], torch.stack(rows)))

    def kl(self, model: Model) -> float:
        """Mean KL in nats (the target's own ‖ `model`'s) of all positions, READ of which `model` reads at once."""
        apart = []
        for prompt, new, own in self.texts:
            chosen = min(len(new), model.capacity - len(prompt) + 1)
            rows_by_place = _logits_along(model, prompt, new[: chosen - 1], READ, range(chosen), False)
            other = torch.stack([*rows_by_place.values()])
            count, size = len(other), min(own.shape[1], other.shape[1])  # rows beyond are padding
            apart.append(forward_kl(*(rows[:count, :size].double().log_softmax(-1) for rows in (own, other))))
        return float(torch.cat(apart).mean())


@dataclass(frozen=True)
class FileKl:
    """Mean KL in nats of a file's own distributions, in float32, to those in its bits; over this many positions."""

    kl: float
    positions: int

    @property
    def words(self) -> str:
        """In a line."""
        return f"KL {self.kl:.2g} nats from the file in float32, {self.positions} positions"


def kl_of_bits(reference: str, decoder: Model | None = None) -> FileKl:
    """How far a GGUF file that PyTorch decodes in its own bits is from the same file in float32, on the greedy texts
    that it continues TEXTS with; measured once for file, code and processor, and kept.

    `decoder` is the file in its bits where it is loaded, with room for these texts.
    """
    versions = [version_of(name) for name in ("torch", "transformers")]
    conditions = [file_digests(reference) or {}, versions, machine()["cpu"], SOURCE.read_text(encoding="utf-8"), TEXTS]
    place = cache_folder("weights") / f"bits-{digest([*conditions, COMPARED])}.json"
    with contextlib.suppress(DataError):
        return read_result(place, FileKl)
    note(f"{reference}: its bits are compared with its values in float32, once")
    tokenizer = load_tokenizer(reference)
    decoder = decoder or growing_decoder(load_in_bits(reference, torch.device("cpu")))
    texts = OwnDistributions(decoder, [encode_text(tokenizer, text) for text in TEXTS]).texts
    rows = [torch.tensor([*prompt, *new[:-1]]) for prompt, new, _ in texts]
    logits = exact_logits(reference, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    apart = []
    for own, (prompt, new, found) in zip(logits, texts, strict=True):
        exact = own[len(prompt) - 1 :][: len(new), : found.shape[1]]  # rows beyond are padding
        apart.append(forward_kl(*(one.double().log_softmax(-1) for one in (exact, found.cpu()))))
    kl = torch.cat(apart)
    result = FileKl(float(kl.mean()), len(kl))
    remember(place, asdict(result))
    return result


# ── Which library and type of file run a target fastest on this machine ──

SIZES = (1, 2, 3, 4, 6, 8)
ACCEPTED, DRAFT = (0.6, 0.7, 0.8, 0.9), 0.2  # of drafted tokens; what one costs, in T(1)
PYTORCH = "PyTorch"  # with the file's own bits
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
    """One library and type: the KL in nats from the distributions of the first, seconds of a prompt of PROMPT tokens
    and T(m) by m behind it."""

    library: str
    type: str
    kl: float
    prompt_seconds: float
    steps: dict[int, float]
    memory: int = 0  # bytes that the process has more than before
    exact: FileKl | None = None  # of PyTorch: to the same file in float32

    def best_length(self, accepted: float) -> int:
        """The draft length that is fastest where drafted tokens are accepted so often and cost DRAFT of T(1)."""
        times = np.interp(range(1, max(SIZES) + 1), SIZES, [self.steps[size] for size in SIZES])
        speeds = predicted_speedups(list(times), DRAFT * times[0], [accepted] * len(times))
        return speeds.index(max(speeds))

    @property
    def request_rate(self) -> float:
        """Tokens per second of a whole request, decoded plainly."""
        return NEW / (self.prompt_seconds + NEW * self.steps[1])


def files_in_types(model: str, kinds: Iterable[str], place: Callable[[str], Path]) -> dict[str, Path]:
    """A model's file of each GGUF type, by its name in tables; at `place` of a type it is written where it is not.

    A GGUF file is its own file of the type that it has; other types are made of its weights, as their names say.
    """
    own = file_type(Path(model)) if is_gguf(model) else None
    files = {kind: Path(model) if kind == own else place(kind) for kind in kinds}
    if missing := {path: kind for kind, path in files.items() if not path.is_file()}:
        export_files(local_folder(model), missing)
    return {kind if own in (None, kind) else f"{kind} (from {own})": path for kind, path in files.items()}


def compare_types(model: str, types: Sequence[str], threads: int | None, repeats: int) -> list[TypeFigures]:
    """A model's files of these types in every library that is installed; the first in llama.cpp, which is the file
    itself where the model is one.

    Files are written to a temporary folder and removed. A library that does not open one, or computes batches of it
    wrongly, is left out with a message; DataError where llama.cpp does not open the first.
    """
    libraries = ["llama.cpp", *(["ik"] if importlib.util.find_spec("ik_llama_cpp") else []), PYTORCH]
    figures = list[TypeFigures]()
    reference: OwnDistributions | None = None
    own = [file_type(Path(model))] if is_gguf(model) else []
    kinds = dict.fromkeys([*own, *types])
    progress = Progress("libraries and types", len(kinds) * len(libraries))
    for kind in kinds:
        with tempfile.TemporaryDirectory() as scratch:
            ((title, place),) = files_in_types(model, [kind], lambda kind: Path(scratch, f"{kind}.gguf")).items()
            for library in libraries:
                before = psutil.Process().memory_info().rss
                try:
                    opened = _opened(place, library, threads)
                except DataError as error:
                    if not figures:
                        raise
                    note(f"{library}, {kind}: left out: {error.what}")
                    progress.step()
                    continue
                with contextlib.closing(opened) as decoder:
                    if reference is None:
                        assert isinstance(decoder, GgufModel)
                        texts = [[*decoder.file.opening, *decoder.file.tokenize(text)] for text in TEXTS]
                        reference = OwnDistributions(decoder, texts)
                    kl = reference.kl(decoder) if figures else 0.0
                    steps = measure_steps(decoder, SIZES, DEPTH, repeats, until_steady=True)
                    seconds = _prompt_seconds(decoder, min(repeats, ENOUGH))
                    memory = max(0, psutil.Process().memory_info().rss - before)
                    exact = kl_of_bits(str(place), decoder) if library == PYTORCH else None
                    figures.append(TypeFigures(library, title, kl, seconds, steps, memory, exact))
                del opened, decoder
                gc.collect()
                progress.step(note=f"{library}, {kind}")
    return figures


def _opened(place: Path, library: str, threads: int | None) -> GgufModel | TorchModel:
    """A file in llama.cpp or ik_llama.cpp, or in its own bits in PyTorch; DataError where that is not possible."""
    if library == PYTORCH:
        torch.set_num_threads(thread_count(threads))
        return growing_decoder(load_packed(str(place)))
    options = GgufOptions.model_validate({"library": library})
    return GgufModel(place, context=CONTEXT, threads=threads, options=options)


def _prompt_seconds(model: Model, repeats: int) -> float:
    """The least seconds that a prompt of 128 tokens took."""
    ids = [7 * index % model.vocabulary_size for index in range(PROMPT)]
    taken = []
    for _ in range(repeats):
        model.rollback([0])
        started = time.perf_counter()
        model.extend(ids, want=[PROMPT - 1]).argmax()
        taken.append(time.perf_counter() - started)
    return min(taken)


def types_table(figures: Sequence[TypeFigures], command: str) -> Table:
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
            one.memory / 1e9,
            "/".join(str(one.best_length(accepted)) for accepted in ACCEPTED),
        ]
        for one in figures
    ]
    heads = ["library", "type", "KL", "prompt tokens/s", "plain tokens/s", *(f"T({m})/T(1)" for m in SIZES[1:])]
    text = (
        f"KL: mean nats from the first row's distributions. Request: {PROMPT} tokens of prompt, {NEW} new ones, plain. "
        f"Length: the fastest where {', '.join(map(str, ACCEPTED))} of the drafted tokens are accepted and each costs "
        f"{DRAFT} T(1)."
    )
    text += "".join(f" {one.library}, {one.type}: {one.exact.words}." for one in figures if one.exact)
    return Table([*heads, "request tokens/s", "GB", "length"], rows, command, "libraries and types", text)


def recommend(figures: Sequence[TypeFigures], most_kl: float) -> str:
    """The fastest of those whose KL is accepted, and what verifying costs there."""
    own = figures[0]
    best = max((one for one in figures if one.kl <= most_kl), key=lambda one: one.request_rate)
    sentence = f"Fastest at a KL of at most {most_kl:g}: {best.library}, {best.type}"
    if best is own:
        return f"{sentence}, the first of them."
    gain, (there, here) = best.request_rate / own.request_rate, (one.steps[4] / one.steps[1] for one in (best, own))
    return (
        f"{sentence}: {gain:.2f}× the request in {own.library}, {own.type}; verifying 4 tokens costs {there:.2f} steps "
        f"there, {here:.2f} in the latter."
    )
