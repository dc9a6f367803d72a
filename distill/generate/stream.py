"""Streamed decoding for a person at a terminal: what the draft got right is marked."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from distill.errors import DataError
from distill.generate.opened import Opened, is_gguf, open_pair
from distill.grammar.constrained import Constrained, Forced
from distill.grammar.constraint import Constraint
from distill.models.base import Model
from distill.models.hugging_face import load_model, local_folder, pick_device
from distill.models.torch_model import TorchModel
from distill.recipe import Recipe, Trial
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration
from distill.speculative.configured import NO_COSTS, make_drafter, require_trees
from distill.speculative.cost import StepCosts, measure_steps
from distill.speculative.decode import Decoded, Rules, decode, plain, require_lossless
from distill.speculative.draft import Drafter
from distill.speculative.lengths import Fixed
from distill.speculative.stop_strings import BytesOf, Characters, stop_before
from distill.speculative.verify import CHAINS, TREES, refusal
from distill.vocabulary import Vocabulary

FOREIGN = ("intersection", "string")
OWN = ("model", "both", "tree")  # drafters that ask the draft in the target's tokens
GREEN, RESET = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Way:
    """How to decode: the sampler, the verifier (None: greedy at temperature 0, else token), who drafts and how many.

    `rule`, `p_min` and `widths` are those of a recipe's trials. `costs` (None: measured beforehand) and `fitted` are
    what the expected-value rule reads. `lossy` lets a way change the target's distribution, which the summary then
    says. `grammar` is its kind and text, see `grammar.constraint`.
    """

    sampler: Sampler
    verifier: str | None = None
    drafter: str = "model"
    length: int = 4
    seed: int = 0
    stop: Sequence[str] = ()
    rule: Any = "fixed"
    p_min: float = 0.5
    costs: StepCosts | None = None
    fitted: Mapping[str, Calibration] = field(default_factory=dict)
    lossy: bool = False
    grammar: tuple[str, str] | None = None
    widths: tuple[int, ...] | None = None


NAMES: dict[str, Any] = {"model": "draft", "both": "lookup+draft"}  # drafters that recipes call otherwise


def trial_of(way: Way, verifier: str) -> Trial:
    """The way as a recipe would write it. ValueError for what no recipe could say."""
    floor = {"p_min": way.p_min} if way.rule in ("p_min", "p_min-after") else {}
    drafter = NAMES.get(way.drafter, way.drafter)
    size: dict[str, Any] = {"length": way.length}
    if way.widths is not None:
        size = {"widths": way.widths}
    elif way.drafter == "tree":
        size["nodes"] = min(2 * way.length, 63)
    try:
        return Trial(drafter=drafter, rule=way.rule, verifier=verifier, **floor, **size)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def measured_costs(target: Model, draft: Model, length: int, depth: int) -> StepCosts:
    """T(1..length + 1), D(1) and D(2), timed now."""
    depth = max(1, min(depth, target.capacity - length - 1, draft.capacity - 2))
    steps = measure_steps(target, range(1, length + 2), depth, 5, target.vocabulary_size)
    own = measure_steps(draft, [1, 2], depth, 5, draft.vocabulary_size)
    return StepCosts(tuple(found[0] for found in steps.values()), own[1][0], own[2][0])


def foreign_drafter(
    recipe: Recipe, references: tuple[str, str], way: Way, verifier: str, draws: random.Random
) -> Drafter:
    """A draft of another vocabulary, as it is: by the tokens both share, or by its text."""
    from distill.speculative.other_vocabulary.drafters import IntersectionDrafter, Reader, StringMatchDrafter

    target, own = (Vocabulary.read(local_folder(reference)) for reference in references)
    model = TorchModel(load_model(references[1], recipe.target.dtype, pick_device(recipe.device)), own.size)
    kind = IntersectionDrafter if way.drafter == "intersection" else StringMatchDrafter
    return kind(Reader(model, target, own), Fixed(way.length), way.sampler, draws.random, argmax=verifier == "match")


def stream(recipe: Recipe, references: tuple[str, str], text: str, limit: int, way: Way) -> None:
    """Continue `text` with (target, draft), printing tokens as rounds end and a summary on stderr.

    Both are folders or hub names, decoded in PyTorch, or GGUF files, decoded in llama.cpp. Accepted tokens are green on
    a terminal; elsewhere the text is printed bare. Where the draft's context ends, decoding goes on without it. Raises
    DataError for a prompt that is empty or fills the target's context, for trees in a model that takes none, and for a
    way that would change the target's distribution.
    """
    if way.drafter in FOREIGN and is_gguf(references[0]):
        raise DataError(f"drafter {way.drafter} reads both tokenizers from Hugging Face folders", "give two of those")
    nodes = 0
    if way.length and way.drafter == "tree":
        try:
            trial = trial_of(way, way.verifier or "match")
        except ValueError as error:
            raise DataError(f"this cannot be drafted: {error}", "correct what it names") from None
        nodes = trial.drawn_nodes or trial.nodes or 0
    asked = way.length > 0 and way.drafter in OWN
    others = "earlier text alone drafts" if way.drafter == "both" else "the target decodes plainly"
    with open_pair(recipe, references, text, limit, asked, nodes, others) as pair:
        _stream(recipe, references, text, way, pair)


def _stream(recipe: Recipe, references: tuple[str, str], text: str, way: Way, pair: Opened) -> None:
    if way.length and way.drafter == "tree":
        require_trees(pair.target, pair.draft)
    certain = way.drafter in ("tree", "lookup", "string") and way.widths is None  # what has no distribution of its own
    usual = "greedy" if way.sampler.temperature == 0 else "match" if certain else "token"
    verifier = way.verifier or usual
    known = TREES if way.drafter == "tree" else CHAINS
    if verifier not in known:
        raise DataError(f"there is no verifier `{verifier}` for drafter {way.drafter}", f"use {', '.join(known)}")
    draws = random.Random(way.seed)
    grammar = None
    if way.grammar is not None:
        grammar = pair.constrain(*way.grammar)
        for warning in grammar.warnings:
            print(f"the grammar is not obeyed in this: {warning}", file=sys.stderr)
    reason: str | None = None
    bytes_of = pair.bytes_of(() if grammar is None else grammar.ends)  # what is printed is a text of the grammar
    rules = Rules(way.sampler, verifier, pair.ends, draws.random, stop_before(bytes_of, way.stop), grammar)
    result = Decoded()
    if way.length == 0:
        print(text, end="", flush=True)
        result = plain(pair.target, pair.ids, pair.room, rules=rules)
        _show(bytes_of, result, [result.tokens], False)
    else:
        try:
            drafter = _drafter(recipe, references, way, verifier, draws, pair, grammar)
            reason = refusal(verifier, drafter.kind, way.sampler.temperature, drafter.tree)
            if not way.lossy:
                require_lossless(drafter, rules)
        except ValueError as error:
            hint = "choose another --drafter, --verifier or --temperature"
            raise DataError(f"this cannot be drafted: {error}", hint) from None
        print(text, end="", flush=True)
        rounds = decode(pair.target, drafter, pair.ids, pair.room, rules, result, way.lossy)
        _show(bytes_of, result, rounds, sys.stdout.isatty())
    if grammar is not None and not grammar.satisfied(result.tokens):
        print("the text ends before the grammar is satisfied: give more --tokens", file=sys.stderr)
    print(_summary(result), file=sys.stderr)
    if reason is not None:
        print(f"LOSSY: this text does not follow the target's distribution: {reason}", file=sys.stderr)


def _summary(result: Decoded) -> str:
    """Tokens and speed and, where rounds were made, what they brought."""
    summary = f"{len(result.tokens)} tokens, {result.tokens_per_second():.1f} tok/s after the first"
    rounds = result.rounds
    if rounds:
        drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
        rate = f"{accepted / drafted:.1%}" if drafted else "none drafted"
        each = max(len(result.tokens) - 1, 0) / len(rounds)
        summary += f", {each:.2f} tokens/round, accepted {accepted}/{drafted} ({rate})"
    return summary


def _drafter(
    recipe: Recipe,
    references: tuple[str, str],
    way: Way,
    verifier: str,
    draws: random.Random,
    pair: Opened,
    grammar: Constraint | None,
) -> Drafter:
    """The drafter that a way names; the expected-value rule's costs are timed where nobody measured them before.

    Where a grammar rules, the draft obeys it too, and what the grammar is sure of is drafted for free.
    """
    if way.drafter in FOREIGN:
        if way.rule != "fixed":
            raise ValueError(f"drafter {way.drafter} drafts fixed lengths only")
        return foreign_drafter(recipe, references, way, verifier, draws)
    costs = NO_COSTS
    if way.rule == "expected-value":
        costs = way.costs or measured_costs(pair.target, pair.draft, way.length, 64)
    asked: Model = pair.draft if grammar is None else Constrained(pair.draft, grammar)
    drafter = make_drafter(trial_of(way, verifier), asked, way.sampler, draws.random, costs, way.fitted)
    return drafter if grammar is None else Forced(drafter, grammar)


def _show(bytes_of: BytesOf, result: Decoded, rounds: Iterable[Sequence[int]], colour: bool) -> None:
    """Print tokens as they become certain, and at the end what is left of one that a stop string cut."""
    shown, characters = 0, Characters()
    for new in rounds:
        for token in new:
            piece = characters.add(bytes_of(token))
            marked = colour and result.from_draft[shown] and piece
            print(f"{GREEN}{piece}{RESET}" if marked else piece, end="", flush=True)
            shown += 1
    print(characters.add(result.rest) + characters.finish())
