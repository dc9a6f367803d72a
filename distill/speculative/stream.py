"""Streamed decoding for a person at a terminal: what the draft got right is marked."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from distill.errors import DataError
from distill.models.base import Model
from distill.models.hugging_face import (
    encode,
    end_ids,
    load_model,
    load_tokenizer,
    local_folder,
    pick_device,
    real_tokens,
)
from distill.models.torch_model import TorchModel
from distill.recipe import Recipe, Trial
from distill.sampler import Sampler
from distill.speculative.calibration import Calibration
from distill.speculative.constrained import Constrained, Forced
from distill.speculative.cost import StepCosts, measure_steps
from distill.speculative.decode import Decoded, Rules, Stop, decode, plain, require_lossless, room_for
from distill.speculative.draft import Drafter
from distill.speculative.grammar import Constraint, constraint
from distill.speculative.lengths import Fixed
from distill.speculative.tokens import Tokens
from distill.speculative.trial import NO_COSTS, make_drafter
from distill.speculative.verify import CHAINS, refusal
from distill.vocabulary import Vocabulary

FOREIGN = ("intersection", "string")
GREEN, RESET = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Way:
    """How to decode: the sampler, the verifier (None: greedy at temperature 0, else token), who drafts and how many.

    `rule` and `p_min` are those of a recipe's trials. `costs` (None: measured beforehand) and `fitted` are what the
    expected-value rule reads. `lossy` lets a way change the target's law, which the summary then says.
    `grammar` is its kind and text, see `grammar.constraint`.
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


NAMES: dict[str, Any] = {"model": "draft", "both": "lookup+draft"}  # drafters that recipes call otherwise


def trial_of(way: Way, verifier: str) -> Trial:
    """The way as a recipe would write it. ValueError for what no recipe could say."""
    floor = {"p_min": way.p_min} if way.rule in ("p_min", "p_min-after") else {}
    nodes = {"nodes": min(2 * way.length, 63)} if way.drafter == "tree" else {}
    drafter = NAMES.get(way.drafter, way.drafter)
    try:
        return Trial(drafter=drafter, rule=way.rule, length=way.length, verifier=verifier, **floor, **nodes)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"].removeprefix("Value error, ")) from None


def measured_costs(target: TorchModel, draft: TorchModel, length: int, depth: int) -> StepCosts:
    """T(1..length + 1), D(1) and D(2), timed now."""
    steps = measure_steps(target, range(1, length + 2), depth, 5, target.vocabulary_size)
    own = measure_steps(draft, [1, 2], depth, 5, draft.vocabulary_size)
    return StepCosts(tuple(found[0] for found in steps.values()), own[1][0], own[2][0])


def foreign_drafter(
    recipe: Recipe, references: tuple[str, str], way: Way, verifier: str, draws: random.Random
) -> Drafter:
    """A draft of another vocabulary, as it is: by the tokens both share, or by its text."""
    from distill.speculative.other_vocabulary import IntersectionDrafter, StringMatchDrafter

    target, own = (Vocabulary.read(local_folder(reference)) for reference in references)
    model = TorchModel(load_model(references[1], recipe.target.dtype, pick_device(recipe.device)), own.size)
    kind = IntersectionDrafter if way.drafter == "intersection" else StringMatchDrafter
    return kind(model, target, own, Fixed(way.length), way.sampler, draws.random, argmax=verifier == "match")


def stopper(tokenizer: Any, stops: Sequence[str]) -> Stop | None:
    """Says how many tokens stand before the first stop text, None while there is none in what was said."""
    if not stops:
        return None

    def stop(tokens: Sequence[int]) -> int | None:
        said = tokenizer.decode(list(tokens))
        places = [said.find(text) for text in stops if text in said]
        if not places:
            return None
        # The most tokens whose text ends before the stop text begins.
        return max(n for n in range(len(tokens) + 1) if len(tokenizer.decode(list(tokens[:n]))) <= min(places))

    return stop


def stream(recipe: Recipe, references: tuple[str, str], text: str, limit: int, way: Way) -> None:
    """Continue `text` with (target, draft), printing tokens as rounds end and a summary on stderr.

    Accepted tokens are green on a terminal; elsewhere the text is printed bare. Raises DataError for a prompt that is
    empty or fills the context, and for a way that would change the target's law.
    """
    device = pick_device(recipe.device)
    tokenizer = load_tokenizer(references[0])
    hugging_face = load_model(references[0], recipe.target.dtype, device)
    vocabulary = real_tokens(hugging_face.config, tokenizer)
    target = TorchModel(hugging_face, vocabulary)
    foreign = way.drafter in FOREIGN
    draft = target if foreign else TorchModel(load_model(references[1], recipe.target.dtype, device), vocabulary)
    ids = encode(tokenizer, text)
    if not ids:
        raise DataError("the prompt is empty", "give some text to continue")
    room = room_for(target, draft, len(ids), limit)
    if room < 1:
        raise DataError(f"the prompt's {len(ids)} tokens fill the context of {target.capacity}", "shorten it")
    if room < limit:
        print(f"the context leaves room for {room} of {limit} tokens", file=sys.stderr)
    certain = way.drafter in ("tree", "lookup", "string")  # what they propose has no law of its own
    usual = "greedy" if way.sampler.temperature == 0 else "match" if certain else "token"
    verifier = way.verifier or usual
    if verifier not in CHAINS:
        raise DataError(f"there is no verifier `{verifier}`", f"use {', '.join(CHAINS)}")
    draws = random.Random(way.seed)
    ends = end_ids(hugging_face.config, tokenizer)
    grammar = None
    if way.grammar is not None:
        grammar = constraint(*way.grammar, Tokens.of(Vocabulary.read(local_folder(references[0])), ends))
        for warning in grammar.warnings:
            print(f"the grammar is not obeyed in this: {warning}", file=sys.stderr)
    reason: str | None = None
    rules = Rules(way.sampler, verifier, ends, draws.random, stopper(tokenizer, way.stop), grammar)
    result = Decoded()
    hidden = () if grammar is None else grammar.ends  # what is printed is a text of the grammar
    if way.length == 0:
        print(text, end="", flush=True)
        result = plain(target, ids, room, rules=rules)
        print(tokenizer.decode([token for token in result.tokens if token not in hidden]))
    else:
        try:
            drafter = _drafter(recipe, references, way, verifier, draws, target, draft, grammar)
            reason = refusal(verifier, drafter.kind, way.sampler.temperature, drafter.tree)
            if not way.lossy:
                require_lossless(drafter, rules)
        except ValueError as error:
            raise DataError(f"this cannot be drafted: {error}", "choose another --drafter or --verifier") from None
        print(text, end="", flush=True)
        texts = decode(target, drafter, ids, room, rules, result, way.lossy)
        _show(tokenizer, result, texts, sys.stdout.isatty(), hidden)
    if grammar is not None and not grammar.satisfied(result.tokens):
        print("the text ends before the grammar is satisfied: give more --tokens", file=sys.stderr)
    rounds = result.rounds
    summary = f"{len(result.tokens)} tokens, {result.tokens_per_second():.1f} tok/s after the first"
    if rounds:
        drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
        rate = f"{accepted / drafted:.1%}" if drafted else "none drafted"
        summary += (
            f", {(len(result.tokens) - 1) / len(rounds):.2f} tokens/round, accepted {accepted}/{drafted} ({rate})"
        )
    print(summary, file=sys.stderr)
    if reason is not None:
        print(f"LOSSY: this text does not follow the target's law: {reason}", file=sys.stderr)


def _drafter(
    recipe: Recipe,
    references: tuple[str, str],
    way: Way,
    verifier: str,
    draws: random.Random,
    target: TorchModel,
    draft: TorchModel,
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
        costs = way.costs or measured_costs(target, draft, way.length, 64)
    asked: Model = draft if grammar is None else Constrained(draft, grammar)
    drafter = make_drafter(trial_of(way, verifier), asked, way.sampler, draws.random, costs, way.fitted)
    return drafter if grammar is None else Forced(drafter, grammar)


def _show(tokenizer: Any, result: Decoded, rounds: Any, colour: bool, hidden: Collection[int] = ()) -> None:
    """Print every round's tokens as they come, but for the hidden ones."""
    shown = 0
    pending: list[int] = []  # bytes of one character may be spread over tokens: wait until they are whole
    for _ in rounds:
        while shown < len(result.tokens):
            pending += [token for token in result.tokens[shown : shown + 1] if token not in hidden]
            piece = tokenizer.decode(pending)
            marked = colour and result.from_draft[shown]
            shown += 1
            if not piece.endswith("\ufffd") or len(pending) > 8:
                print(f"{GREEN}{piece}{RESET}" if marked else piece, end="", flush=True)
                pending = []
    print(tokenizer.decode(pending))
