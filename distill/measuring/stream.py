"""Streamed decoding for a person at a terminal: the draft's accepted tokens are marked."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from distill.decoding.calibration import Calibration
from distill.decoding.configured import NO_COSTS, Fitted, Session, make_drafter, name_of_fit, require_trees
from distill.decoding.decode import Decoded
from distill.decoding.drafters import Drafter, NoDrafter
from distill.decoding.grammar import Constraint, Tokens, constraint
from distill.decoding.other_vocabulary import DraftReader, read_with
from distill.decoding.round_costs import pair_costs
from distill.decoding.rules import BytesOf, Constrained, Forced, Rules, characters, stop_before
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import GROWING, LoadedPair, context_of, encode_prompt, load_pair
from distill.errors import DataError
from distill.files import is_gguf
from distill.progress import note
from distill.recipe import Configuration, Gguf, PyTorch, Target
from distill.sampler import Sampler
from distill.teacher.store import open_table

GREEN, RESET = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Request:
    """How to continue a text: the configuration, the served sampler, where it ends, and the seed.

    `fitted` are calibrations by name. `lossy` allows a configuration
    that changes the target's distribution; the summary then says so. `grammar` is its kind and text, see
    `grammar.constraint`. `table` holds n-grams of the target (a file, or a run that has one), for drafter table.
    """

    configuration: Configuration
    sampler: Sampler
    seed: int = 0
    stop: Sequence[str] = ()
    fitted: Mapping[str, Calibration] = field(default_factory=dict)
    lossy: bool = False
    grammar: tuple[str, str] | None = None
    table: Path | None = None


@dataclass(frozen=True)
class Opening:
    """A pair to be loaded: folders or hub names, decoded in PyTorch as `pytorch` says, or GGUF files, decoded in
    llama.cpp with the options `gguf`. `draft` may be None where a configuration asks no draft."""

    target: Target
    draft: str | None
    device: str = "auto"
    threads: int | None = None
    gguf: Gguf | None = None
    pytorch: PyTorch = GROWING


@contextlib.contextmanager
def opened(opening: Opening, request: Request, tokens: int) -> Iterator[tuple[LoadedPair, DraftReader | None]]:
    """The pair with room for texts of so many tokens, and the reader of a draft of another vocabulary.

    Beyond the end of the draft's context, decoding goes on without it, which stderr says.
    """
    configuration, target = request.configuration, opening.target
    name = name_of_fit(configuration, request.sampler)
    if configuration.needs_calibration and name not in request.fitted:
        greedy = configuration.counts_ngrams and "table" in request.fitted
        other = "that of greedy texts stands" if greedy else "the drafter's own probabilities stand"
        note(f"no calibration `{name}` was fitted: {other} in for it")
    if configuration.other_vocabulary and is_gguf(target.model) and not opening.pytorch.in_bits:
        raise DataError(f"drafter {configuration.drafter} reads both tokenizers from Hugging Face folders")
    loaded = opening.draft if configuration.asks_the_draft else None
    options: dict[str, Any] = {"device": opening.device, "nodes": configuration.most_nodes, "threads": opening.threads}
    options |= {"gguf": opening.gguf or Gguf(), "pytorch": opening.pytorch}
    with load_pair(target, loaded, tokens=tokens, **options) as pair:
        if loaded is not None and pair.draft.capacity < tokens:
            looks_up = configuration.drafter.startswith("lookup+")
            rest = "only the lookup drafts" if looks_up else "the target decodes plainly"
            print(f"the draft {loaded} has a context of {pair.draft.capacity}: beyond it {rest}", file=sys.stderr)
        reader = None
        if configuration.other_vocabulary and opening.draft is not None:
            reader = read_with(pair, target, opening.draft, opening.device)
        yield pair, reader


def stream(opening: Opening, text: str, limit: int, request: Request, message: Sequence[int] | None = None) -> None:
    """Continue `text` by at most `limit` tokens, printing them as rounds end, and a summary on stderr. Of a `message`,
    the token ids of a conversation up to its answer, only the answer is printed.

    Accepted tokens are green on a terminal; elsewhere the text alone is printed. Raises DataError for a prompt that is
    empty or fills the target's context, for trees in a model that takes none, and for a configuration that would change
    the target's distribution.
    """
    model = opening.target.model
    ids = encode_prompt(model, text) if message is None else message
    room = _room(ids, limit, context_of(model))
    with opened(opening, request, len(ids) + room) as (pair, reader):
        _continue(pair, reader, request, text if message is None else "", ids, room)


def _room(ids: Sequence[int], limit: int, context: int | None) -> int:
    """New tokens that fit, at most `limit`; stderr says where there are fewer."""
    room = limit if context is None else min(limit, context - len(ids))
    if room < 1:
        raise DataError(f"the prompt's {len(ids)} tokens fill the target's context of {context}", "shorten it")
    if room < limit:
        print(f"the target's context of {context} leaves room for {room} of {limit} tokens", file=sys.stderr)
    return room


def begin(pair: LoadedPair, reader: DraftReader | None, request: Request, ids: Sequence[int]) -> Session:
    """What continues the prompt `ids`; nothing is decoded yet.

    Raises DataError for a configuration that cannot be drafted, such as trees in a model that takes none, or is lossy
    and not allowed to be.
    """
    configuration, draws = request.configuration, random.Random(request.seed).random
    grammar = None if request.grammar is None else _constraint(pair, *request.grammar)
    for warning in () if grammar is None else grammar.warnings:
        print(f"the grammar is not obeyed in this: {warning}", file=sys.stderr)
    verifier = (
        configuration.verified_by if configuration.drafts else "token" if request.sampler.temperature else "greedy"
    )
    stop = stop_before(_shown(pair, grammar), request.stop)
    rules = Rules(request.sampler, verifier, pair.ends, draws, stop, grammar)
    if configuration.branches:
        require_trees(pair.target, pair.draft)
    try:
        session = Session(pair.target, configuration, rules, partial(_drafter, pair, reader, request, rules, ids))
    except ValueError as error:
        hint = "choose another drafter, verifier or temperature"
        raise DataError(f"this cannot be drafted: {error}", hint) from None
    if session.lossy is not None and not request.lossy:
        raise DataError(
            f"verifier {verifier} would change the target's distribution: {session.lossy}", "or allow it as lossy"
        )
    return session


def _shown(pair: LoadedPair, grammar: Constraint | None) -> BytesOf:
    """The bytes of tokens; none for those that end a text of a grammar, so that it is one."""
    silent = () if grammar is None else grammar.ends
    return lambda token: b"" if token in silent else pair.token_bytes(token)


def _continue(
    pair: LoadedPair, reader: DraftReader | None, request: Request, text: str, ids: Sequence[int], room: int
) -> None:
    """Decode and print; nothing is printed before all is known to be possible."""
    session, result = begin(pair, reader, request, ids), Decoded()
    grammar = session.rules.constraint
    print(text, end="", flush=True)
    colour = request.configuration.drafts and sys.stdout.isatty()
    _show(_shown(pair, grammar), result, session.stream(ids, room, result), colour)
    if grammar is not None and not grammar.satisfied(result.tokens):
        print("the text ends before the grammar is satisfied: give more --tokens", file=sys.stderr)
    note(_summary(result))
    if session.lossy is not None:
        print(f"LOSSY: this text does not follow the target's distribution: {session.lossy}", file=sys.stderr)


def _constraint(pair: LoadedPair, kind: str, grammar: str) -> Constraint:
    """A grammar over the pair's vocabulary."""
    if isinstance(pair.target, GgufModel):
        return constraint(kind, grammar, Tokens.of_gguf(pair.target))
    return constraint(kind, grammar, Tokens.of(pair.vocabulary, pair.ends))


def _drafter(
    pair: LoadedPair, reader: DraftReader | None, request: Request, rules: Rules, ids: Sequence[int]
) -> Drafter:
    """The drafter of the request; `reader` is a draft of another vocabulary, which obeys no grammar.

    The expected-value rule's costs are those kept of this pair, or are timed behind the prompt `ids`. Under a grammar
    the draft obeys it too, and tokens that the grammar leaves no choice about are drafted for free.
    """
    configuration, grammar = request.configuration, rules.constraint
    if not configuration.drafts:
        return NoDrafter() if grammar is None else Forced(NoDrafter(), grammar)
    if reader is not None:
        return make_drafter(configuration, reader, rules.sampler, rules.random)
    priced = configuration.rule == "expected-value"
    costs = pair_costs(pair, [ids], configuration.longest_round) if priced else NO_COSTS
    asked: Any = pair.draft if grammar is None else Constrained(pair.draft, grammar)
    table = None if request.table is None else open_table(request.table, pair.reference)
    fitted = Fitted(costs, request.fitted, table=table, max_leaves=pair.target.max_leaves)
    drafter = make_drafter(configuration, asked, rules.sampler, rules.random, fitted)
    return drafter if grammar is None else Forced(drafter, grammar)


def _summary(result: Decoded) -> str:
    """Tokens and speed and, where rounds were made, the acceptance rate."""
    summary = f"{len(result.tokens)} tokens, {result.tokens_per_second():.1f} tok/s after the first"
    rounds = result.rounds
    if rounds:
        drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
        rate = f"{accepted / drafted:.1%}" if drafted else "none drafted"
        each = max(len(result.tokens) - 1, 0) / len(rounds)
        summary += f", {each:.2f} tokens/round, acceptance rate {rate} ({accepted}/{drafted})"
    return summary


def pieces(bytes_of: BytesOf, result: Decoded, rounds: Iterable[Sequence[int]]) -> Iterator[tuple[str, bool]]:
    """The text of tokens as they become certain, and whether each was drafted and accepted; at the end the rest of one
    that a stop string cut."""
    shown, decoder = 0, characters()
    for new in rounds:
        for token in new:
            yield decoder.decode(bytes_of(token)), result.from_draft[shown]
            shown += 1
    yield decoder.decode(result.rest, final=True), False


def show(parts: Iterable[tuple[str, bool]], marks: tuple[str, str]) -> str:
    """Print the pieces of a text, with `marks` around those that were drafted; the text without them."""
    drafted, text = False, ""
    try:
        for piece, accepted in parts:
            if piece and accepted != drafted:
                print(marks[drafted], end="")
                drafted = accepted
            print(piece, end="", flush=True)
            text += piece
    finally:
        print(marks[1] if drafted else "")
    return text


def _show(bytes_of: BytesOf, result: Decoded, rounds: Iterable[Sequence[int]], colour: bool) -> None:
    """Print tokens as they become certain."""
    show(pieces(bytes_of, result, rounds), (GREEN, RESET) if colour else ("", ""))
