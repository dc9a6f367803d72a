"""Whether a text, or a distribution, is the target's.

Greedy speculative text must equal plain text unless rounding explains the first difference. The target in another
engine or type of file has a KL to its own distributions.

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
from distill.engines.loaded import growing_decoder
from distill.engines.model import ROOT, Model
from distill.engines.torch.hugging_face import encode_text, load_tokenizer, local_folder
from distill.engines.torch.model import TorchModel
from distill.engines.torch.products import exact_logits, kernel_version, load_in_bits, load_packed
from distill.errors import DataError
from distill.files import cache_folder, digest, file_digests, is_gguf, read_result, remember
from distill.gguf.importing import file_type
from distill.gguf.writer import export_files
from distill.machine import machine, thread_count, version_of
from distill.progress import Progress, note
from distill.recipe import Configuration, GgufOptions, Target
from distill.tables import Cell, Row, Table

TORCH_NOISE = 1e-4  # In fp32, logits closer than this are tied.


@dataclass(frozen=True)
class Rounding:
    """How far rounding moves a target's logits. Two logits within `noise` are tied.

    In a type that rounds coarsely, ties are also tested with steps of as many tokens as each of `sizes`, and with
    `trees` also as paths through trees. See `ties`.
    """

    noise: float
    sizes: tuple[int, ...] = ()
    trees: bool = False


@dataclass
class Identity:
    """Numbers of texts that equal the plain text, first differ at a rounding tie (`excused`), or differ otherwise."""

    identical: int = 0
    excused: int = 0
    different: int = 0


def judged(
    target: Model, prompt: Sequence[int], plain: Sequence[int], others: Sequence[Sequence[int]], rounding: Rounding
) -> list[str]:
    """Classify each text of `others` against the `plain` text. Returns names of fields of Identity."""
    first = [first_difference(plain, other) for other in others]
    differing = [(other, where) for other, where in zip(others, first, strict=True) if where is not None]
    tied = iter(ties(target, prompt, plain, differing, rounding))
    return ["identical" if where is None else "excused" if next(tied) else "different" for where in first]


def rounding_noise(model: Model, prompt: Sequence[int], tokens: Sequence[int]) -> float:
    """Return the largest absolute logit difference between reading `tokens` singly and together, after `prompt`."""
    model.rollback([0])
    model.extend(prompt, want=[len(prompt) - 1])
    together = model.extend(tokens).full()
    model.rollback([len(prompt)])
    largest = 0.0
    for index, token in enumerate(tokens):
        largest = max(largest, float((model.extend([token]).full()[0] - together[index]).abs().max()))
    return largest


def top_gap(model: Model, context: Sequence[int]) -> float:
    """Return the difference of the two largest logits after `context`. DataError if they are not finite."""
    model.rollback([0])
    logits = model.extend(context, want=[len(context) - 1])
    logits.argmax()  # It refuses NaN and infinity, which have no gap.
    best, second = logits.full()[0].topk(2).values.tolist()
    return float(best - second)


def ties(
    target: Model,
    prompt: Sequence[int],
    text: Sequence[int],
    others: Sequence[tuple[Sequence[int], int]],
    rounding: Rounding,
) -> list[bool]:
    """Whether rounding alone explains each difference. `others` are texts with the place where they leave `text`.

    It does if the target's two best logits lie within the noise. In a type that rounds coarsely, logits depend on how
    many tokens are read at once, all along the text, because the cache keeps the differences. For such a type, the
    distance between the two tokens' logits is read with the text in single tokens and in steps of each size. The spread
    of these distances is the rounding. After trees, the cache may hold the text in another order, which rounds
    differently again. The text is read once per size for all others, until each of them is decided.
    """
    gaps = {where: top_gap(target, [*prompt, *text[:where]]) for where in sorted({where for _, where in others})}
    tied = [gaps[where] <= rounding.noise for _, where in others]
    undecided: dict[int, list[float]] = {
        number: []
        for number, (other, where) in enumerate(others)
        if rounding.sizes and not tied[number] and where < min(len(text), len(other))
    }
    ways = [(size, False) for size in (1, *rounding.sizes)]
    ways += [(size, True) for size in rounding.sizes if rounding.trees]
    for size, tree in ways:
        if not undecided:
            break
        logits = _logits_along(target, prompt, text, size, {others[number][1] for number in undecided}, tree)
        for number, distances in list(undecided.items()):
            other, where = others[number]
            row = logits[where]
            distances.append(float(row[text[where]] - row[other[where]]))
            tied[number] = 0 <= distances[0] <= max(distances) - min(distances)
            if tied[number] or distances[0] < 0:  # The spread only grows.
                del undecided[number]
    return tied


def _logits_along(
    target: Model, prompt: Sequence[int], text: Sequence[int], size: int, places: Collection[int], tree: bool
) -> dict[int, Tensor]:
    """Return the logits [V] before the text's tokens at these places, with the text read in steps of `size` tokens.

    As a `tree`, each step has another node after its first token, which is then dropped.
    """
    ids, logits_at = [*prompt, *text], dict[int, Tensor]()
    place_of_index = {len(prompt) + place - 1: place for place in places}
    # Plain decoding reads the whole prompt at once. A round reads its last token together with the drafted tokens.
    begin = len(prompt) - (size > 1)
    target.rollback([0])
    if begin and place_of_index:
        logits = target.extend(ids[:begin], want=[begin - 1]).full()
        if begin - 1 in place_of_index:
            logits_at[place_of_index[begin - 1]] = logits[0]
    for start in range(begin, max(place_of_index, default=-1) + 1, size):
        piece = ids[start : start + size]
        wanted = [at for at in range(start, start + len(piece)) if at in place_of_index]
        rows = [at - start for at in wanted] or [len(piece) - 1]
        if tree and len(piece) > 1 and target.capacity - start > len(piece):
            path = [0, *range(2, len(piece) + 1)]
            nodes = [piece[0], piece[0], *piece[1:]]
            logits = target.extend(nodes, parents=[ROOT, 0, *path[:-1]], want=[path[row] for row in rows]).full()
            target.keep([path])
        else:
            logits = target.extend(piece, want=rows).full()
        logits_at |= {place_of_index[at]: row for at, row in zip(wanted, logits, strict=False)}
    return logits_at


def measured_rounding(
    settings: Target,
    backend: str,
    target: Model,
    prompt: Sequence[int],
    text: Sequence[int],
    configurations: Sequence[Configuration],
) -> Rounding:
    """Return the rounding of a target. It is a constant in fp32 and measured for other types.

    The measurement reads the plain `text` after a prompt in pieces as long as the longest rounds of the greedy
    configurations (a tree's nodes, a lookup's length). Ties are then tested in steps of these sizes and of every size
    up to the longest fixed length. If trees are drafted, and the target takes them, ties are also tested as paths
    through trees.
    """
    if backend == "pytorch" and settings.dtype == "float32" and settings.quantise is None:
        return Rounding(TORCH_NOISE)
    greedy = [configuration for configuration in configurations if configuration.sampler == "greedy"]
    drafted = {
        size
        for configuration in greedy
        for size in (configuration.most_nodes, 0 if configuration.drafter == "tree" else configuration.longest)
    }
    chains = [
        configuration.longest
        for configuration in greedy
        if configuration.drafter == "draft" and configuration.length_rule == "fixed"
    ]
    pieces = [text[start : start + length + 1] for length in sorted(drafted - {0}) for start in (0, 16)]
    # A text may end before the longest length.
    noise = max((rounding_noise(target, prompt, piece) for piece in pieces if len(piece) > 1), default=0.0)
    sizes = {*range(2, max(chains, default=0) + 2), *(length + 1 for length in drafted - {0})}
    trees = any(configuration.most_nodes for configuration in configurations) and target.max_leaves > 1
    return Rounding(noise, tuple(sorted(sizes)), trees)


# ── How far the target in another engine or type of file is from its own distributions ──

COMPARED = 4, 64  # prompts, and tokens after each
TOKENS_AT_ONCE = 16  # The KL is that of single tokens within 2 %, in a fifth of the time.


class OwnDistributions:
    """The target's own distributions in its greedy texts, with which other engines and files are compared."""

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
        """Return the mean KL in nats (target ‖ `model`) over all positions. `model` reads TOKENS_AT_ONCE at once."""
        divergences = []
        for prompt, new, target_rows in self.texts:
            chosen = min(len(new), model.capacity - len(prompt) + 1)
            rows_by_place = _logits_along(model, prompt, new[: chosen - 1], TOKENS_AT_ONCE, range(chosen), False)
            other = torch.stack([*rows_by_place.values()])
            count, size = len(other), min(target_rows.shape[1], other.shape[1])  # Columns beyond `size` are padding.
            both = (rows[:count, :size].double().log_softmax(-1) for rows in (target_rows, other))
            divergences.append(forward_kl(*both))
        return float(torch.cat(divergences).mean())


@dataclass(frozen=True)
class FileKl:
    """Mean KL in nats from a file's distributions in float32 to those in its own bits, over this many positions."""

    kl: float
    positions: int

    @property
    def words(self) -> str:
        """The figures in words."""
        return f"KL {self.kl:.2g} nats from the file in float32, {self.positions} positions"


def kl_of_bits(reference: str, decoder: Model | None = None) -> FileKl:
    """Return the KL of a GGUF file in its own bits to the same file in float32, decoded by PyTorch.

    The positions are in greedy continuations of TEXTS. The KL is measured once per file, code and processor, and kept.
    `decoder` is the file in its bits if it is loaded, with room for these texts.
    """
    versions = [version_of(name) for name in ("torch", "transformers")]
    conditions = [file_digests(reference) or {}, versions, machine()["cpu"], kernel_version(), TEXTS]
    place = cache_folder("weights") / f"bits-{digest([*conditions, COMPARED])}.json"
    with contextlib.suppress(DataError):
        return read_result(place, FileKl)
    note(f"{reference}: comparing its bits with its values in float32, once")
    tokenizer = load_tokenizer(reference)
    decoder = decoder or growing_decoder(load_in_bits(reference, torch.device("cpu")))
    texts = OwnDistributions(decoder, [encode_text(tokenizer, text) for text in TEXTS]).texts
    rows = [torch.tensor([*prompt, *new[:-1]]) for prompt, new, _ in texts]
    logits = exact_logits(reference, torch.nn.utils.rnn.pad_sequence(rows, batch_first=True))
    divergences = []
    for exact_rows, (prompt, new, decoded_rows) in zip(logits, texts, strict=True):
        size = decoded_rows.shape[1]  # Columns beyond `size` are padding.
        exact = exact_rows[len(prompt) - 1 :][: len(new), :size]
        both = (rows.double().log_softmax(-1) for rows in (exact, decoded_rows.cpu()))
        divergences.append(forward_kl(*both))
    kl = torch.cat(divergences)
    result = FileKl(float(kl.mean()), len(kl))
    remember(place, asdict(result))
    return result


# ── Which library and type of file run a target fastest on this machine ──

SIZES = (1, 2, 3, 4, 6, 8)
ACCEPTED, DRAFT = (0.6, 0.7, 0.8, 0.9), 0.2  # conditional acceptances, and the cost of a drafted token in T(1)
PYTORCH = "PyTorch"  # with the file's own bits
DEPTH = 128  # tokens in the cache when steps are timed
PROMPT, NEW = 128, 128  # tokens of the request whose rate is computed
CONTEXT = 512
TEXTS = (
    "The history of the bicycle begins in the nineteenth century, when",
    "def read_lines(path):\n    ",
    "Dear Ms Weber,\n\nthank you for your letter of 3 May. ",
    "Question: A train leaves at 8:15 and arrives at 11:40. How long does it take?\nAnswer:",
)


@dataclass(frozen=True)
class TypeFigures:
    """One library and type: KL in nats from the first row's distributions, and times.

    `prompt_seconds` is for a prompt of PROMPT tokens. `steps` is T(m) by m, after DEPTH tokens.
    """

    library: str
    type: str
    kl: float
    prompt_seconds: float
    steps: dict[int, float]
    memory: int = 0  # bytes by which the process grew
    exact: FileKl | None = None  # for PyTorch, the KL to the same file in float32

    def best_length(self, accepted: float) -> int:
        """Return the fastest draft length if drafted tokens have this acceptance and each costs DRAFT × T(1)."""
        times = np.interp(range(1, max(SIZES) + 1), SIZES, [self.steps[size] for size in SIZES])
        speeds = predicted_speedups(list(times), DRAFT * times[0], [accepted] * len(times))
        return speeds.index(max(speeds))

    @property
    def request_rate(self) -> float:
        """Tokens per second of a whole request, decoded plainly."""
        return NEW / (self.prompt_seconds + NEW * self.steps[1])


def files_in_types(model: str, kinds: Iterable[str], place: Callable[[str], Path]) -> dict[str, Path]:
    """Return a model's file of each GGUF type, by its name in tables. Missing files are written to `place(type)`.

    A GGUF file serves as its own file of its type. Other types are made from its weights, and their names say so.
    """
    own_type = file_type(Path(model)) if is_gguf(model) else None
    files = {kind: Path(model) if kind == own_type else place(kind) for kind in kinds}
    if missing := {path: kind for kind, path in files.items() if not path.is_file()}:
        export_files(local_folder(model), missing)
    return {kind if own_type in (None, kind) else f"{kind} (from {own_type})": path for kind, path in files.items()}


def compare_types(model: str, types: Sequence[str], threads: int | None, repeats: int) -> list[TypeFigures]:
    """Measure a model's files of these types in every installed library. The first row is llama.cpp's first file.

    If the model is a GGUF file, its own type comes first. Files are written to a temporary folder and removed. If a
    library cannot open a file, or computes batches of it wrongly, it is left out with a message. Raises DataError if
    llama.cpp cannot open the first file.
    """
    libraries = ["llama.cpp", *(["ik"] if importlib.util.find_spec("ik_llama_cpp") else []), PYTORCH]
    figures = list[TypeFigures]()
    reference: OwnDistributions | None = None
    own_type = [file_type(Path(model))] if is_gguf(model) else []
    kinds = dict.fromkeys([*own_type, *types])
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
    """Open a file in llama.cpp, in ik_llama.cpp, or in its own bits in PyTorch. DataError if that is not possible."""
    if library == PYTORCH:
        torch.set_num_threads(thread_count(threads))
        return growing_decoder(load_packed(str(place)))
    options = GgufOptions.model_validate({"library": library})
    return GgufModel(place, context=CONTEXT, threads=threads, options=options)


def _prompt_seconds(model: Model, repeats: int) -> float:
    """Return the fewest seconds that a prompt of PROMPT tokens took."""
    ids = [7 * index % model.vocabulary_size for index in range(PROMPT)]
    taken = []
    for _ in range(repeats):
        model.rollback([0])
        started = time.perf_counter()
        model.extend(ids, want=[PROMPT - 1]).argmax()
        taken.append(time.perf_counter() - started)
    return min(taken)


def types_table(figures: Sequence[TypeFigures], command: str) -> Table:
    """Return a table with a row for each library and type."""
    rows: list[Row] = [
        [
            row.library,
            row.type,
            Cell(row.kl, ".4f"),
            PROMPT / row.prompt_seconds,
            1 / row.steps[1],
            *(Cell(row.steps[m] / row.steps[1], ".2f") for m in SIZES[1:]),
            row.request_rate,
            row.memory / 1e9,
            "/".join(str(row.best_length(accepted)) for accepted in ACCEPTED),
        ]
        for row in figures
    ]
    heads = ["library", "type", "KL", "prompt tokens/s", "plain tokens/s", *(f"T({m})/T(1)" for m in SIZES[1:])]
    text = (
        f"KL: mean nats from the first row's distributions. Request: {PROMPT} tokens of prompt and {NEW} new tokens, "
        f"plain. Length: the fastest draft length if {', '.join(map(str, ACCEPTED))} of drafted tokens are accepted "
        f"and each costs {DRAFT} T(1)."
    )
    text += "".join(f" {row.library}, {row.type}: {row.exact.words}." for row in figures if row.exact)
    return Table([*heads, "request tokens/s", "GB", "length"], rows, command, "libraries and types", text)


def recommend(figures: Sequence[TypeFigures], most_kl: float) -> str:
    """Name the fastest library and type whose KL is at most `most_kl`, and the cost of verifying there."""
    first = figures[0]
    best = max((row for row in figures if row.kl <= most_kl), key=lambda row: row.request_rate)
    sentence = f"Fastest at a KL of at most {most_kl:g}: {best.library}, {best.type}"
    if best is first:
        return f"{sentence}, the first row."
    gain = best.request_rate / first.request_rate
    best_cost, first_cost = (row.steps[4] / row.steps[1] for row in (best, first))
    return (
        f"{sentence}: {gain:.2f}× the request rate of {first.library}, {first.type}. Verifying 4 tokens costs "
        f"{best_cost:.2f} steps instead of {first_cost:.2f}."
    )
