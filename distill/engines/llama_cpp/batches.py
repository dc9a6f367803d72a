"""Whether a library computes several tokens at once as it computes them one by one: measured before it is believed.

A kernel for batches that is wrong gives a text that looks like one (ik_llama.cpp 0.1.5, q4_1 files, from 32 tokens on,
a KL of 1.6 nats on the processor where it was found), and speculative decoding verifies in batches.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from distill.divergences import forward_kl
from distill.engines.llama_cpp.context import Branches, GgufContext
from distill.engines.model import ROOT, PendingTree
from distill.errors import DataError
from distill.files import cache_folder, digest, read_result, remember
from distill.gguf.importing import file_name
from distill.gguf.library import GgufFile
from distill.machine import machine
from distill.progress import duration, note
from distill.recipe import GgufOptions
from distill.recipe.measuring import MOST_KL

SIZES = (2, 8, 16, 31, 32, 64)
BRANCHED = (ROOT, 0, 0)  # parents in the trees that are tried
ALONG = 32  # tokens of the text that are paths through trees
TEXT = (
    "The bicycle was invented in the nineteenth century, when builders in several countries tried to make machines "
    "that a rider moves with the feet. The first ones were heavy, made of wood and hard to steer; later ones had "
    "pedals, chains and tyres of rubber, and soon millions of people used them every day to go to work or to see more."
)


@dataclass(frozen=True)
class BatchCheck:
    """What a library makes of a file's tokens in batches of each size.

    `kl` is the mean KL in nats (one by one ‖ together); `trees` is the mean KL where the text is a path through trees,
    None for a recurrent model.
    """

    library: str
    kl: dict[int, float]
    trees: float | None

    @property
    def largest(self) -> int | None:
        """The most tokens that may be computed at once; None: as many as were tried, or more."""
        sound = list(takewhile(lambda size: self.kl[size] <= MOST_KL, sorted(self.kl)))
        return None if len(sound) == len(self.kl) else max(sound, default=1)

    @property
    def takes_trees(self) -> bool:
        """Whether trees give the logits of single tokens, or nearly so."""
        return self.trees is not None and self.trees <= MOST_KL

    def describe(self) -> str:
        """What is wrong, and what follows from it, in a sentence."""
        faults, worst = [], max(self.kl, key=lambda size: self.kl[size])
        if self.largest is not None:
            faults.append(
                f"{worst} tokens at once differ from single ones by a KL of {self.kl[worst]:.2g}, so that no more than "
                f"{self.largest} are computed at once"
            )
        if self.trees is not None and not self.takes_trees:
            faults.append(f"trees are wrong (KL {self.trees:.2g}) and not used")
        return f"{self.library}: {'; '.join(faults)}"


def checked_batches(file: GgufFile, options: GgufOptions) -> BatchCheck | None:
    """Compare batches with single tokens, once for each file, build, processor and options that compute.

    None where every token is computed alone. DataError where the library computes two tokens otherwise than one.
    """
    sizes = [size for size in SIZES if size <= min(options.ubatch_size or size, file.context_length)]
    if not sizes:
        return None
    library = "ik_llama.cpp" if options.library == "ik" else "llama.cpp"
    given = {name: value for name, value in options.given().items() if not name.startswith("threads")}
    conditions = [file.build, machine()["cpu"], given, sizes]
    place = cache_folder("batches") / f"{file_name(file.path)}-{digest(conditions)[:12]}.json"
    try:
        check = read_result(place, BatchCheck)
    except DataError:
        name, started = Path(file.path).name, time.monotonic()
        note(f"{name}: batches of 2 to {sizes[-1]} tokens are compared with single ones, once in this {library}")
        check = _measure(file, library, options, sizes)
        note(f"{name}: compared in {duration(time.monotonic() - started)}")
        remember(place, asdict(check))
    if check.largest == 1:
        raise DataError(
            f"{file.path}: {library} computes 2 tokens at once otherwise than one by one (KL {check.kl[2]:.2g} nats)",
            "use another library or type of file; ubatch_size 1 computes each alone, at no gain",
        )
    return check


def _measure(file: GgufFile, library: str, options: GgufOptions, sizes: list[int]) -> BatchCheck:
    count = max(sizes)
    ids = np.resize(np.array(file.tokenize(TEXT) or [0]), count)
    context = GgufContext(file, count, count, 1, options.model_copy(update={"ubatch_size": count}))
    try:
        rows, states = [], {}
        for place in range(count):
            if file.recurrent and place and count - place in sizes:
                states[place] = context.state()
            rows.append(_rows(context, ids[place : place + 1], place))
        single = np.concatenate(rows)
        kl = {}
        for size in sizes:  # ascending: each removes what the one before it decoded
            if count - size in states:
                context.restore(states[count - size], count - size)
            else:
                context.remove(0, count - size)
            together = _rows(context, ids[count - size :], count - size)
            kl[size] = _mean_kl(single[count - size :], together)
    finally:
        context.close()
    return BatchCheck(library, kl, None if file.recurrent else _kl_of_trees(file, options, ids, single))


def _kl_of_trees(file: GgufFile, options: GgufOptions, ids: NDArray[np.int64], single: NDArray[np.float32]) -> float:
    """Mean KL of the text's logits [n, V] one by one to those in trees of two of its tokens, with another one between.

    The gaps that rejected nodes leave in the cache come to lie in every place.
    """
    context = GgufContext(
        file, 2 * len(ids), len(BRANCHED), 3, options.model_copy(update={"ubatch_size": len(BRANCHED)})
    )
    try:
        branches, rows = Branches(context, 2), []
        for place in range(0, min(ALONG, len(ids)) - 1, 2):
            first, second = ids[place : place + 2]
            positions = np.array([place, place + 1, place + 1], dtype=np.int32)
            with branches.growing(PendingTree().grown(BRANCHED), place) as through:
                nodes = np.array([first, (second + 1) % file.vocabulary_size, second])
                rows.append(context.decode_nodes(nodes, np.ones(3, dtype=np.int8), positions, through)[[0, 2]])
            branches.commit([[0, 2]], place)
    finally:
        context.close()
    return _mean_kl(single[: 2 * len(rows)], np.concatenate(rows))


def _rows(context: GgufContext, ids: NDArray[np.int64], start: int) -> NDArray[np.float32]:
    return context.decode_chain(ids, np.ones(len(ids), dtype=np.int8), start).copy()


def _mean_kl(p: NDArray[np.float32], q: NDArray[np.float32]) -> float:
    """Mean KL(p ‖ q) in nats of logits [n, V]."""
    first, second = (torch.from_numpy(rows).double().log_softmax(-1) for rows in (p, q))
    return float(forward_kl(first, second).mean())
