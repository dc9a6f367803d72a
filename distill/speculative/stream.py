"""Streamed decoding for a person at a terminal: what the draft got right is marked."""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from distill.errors import DataError
from distill.models.base import Model
from distill.models.hugging_face import (
    TorchModel,
    encode,
    end_ids,
    load_model,
    load_tokenizer,
    local_folder,
    pick_device,
    real_tokens,
)
from distill.recipe import Recipe
from distill.sampler import Sampler
from distill.speculative.constrained import Constrained, Forced
from distill.speculative.decode import Decoded, Rules, Stop, decode, plain, require_lossless, room_for
from distill.speculative.draft import Drafter, FirstThen, LookupDrafter, ModelDrafter, TreeDrafter
from distill.speculative.grammar import Constraint, constraint
from distill.speculative.lengths import Fixed
from distill.speculative.tokens import Tokens
from distill.speculative.verify import CHAINS
from distill.vocabulary import Vocabulary

FOREIGN = ("intersection", "string")
GREEN, RESET = "\x1b[32m", "\x1b[0m"


@dataclass(frozen=True)
class Way:
    """How to decode: the sampler, the verifier (None: greedy at temperature 0, else token), who drafts and how many.

    `grammar` is its kind and text, see `grammar.constraint`.
    """

    sampler: Sampler
    verifier: str | None = None
    drafter: str = "model"
    length: int = 4
    seed: int = 0
    stop: Sequence[str] = ()
    grammar: tuple[str, str] | None = None


def make_drafter(draft: Model, way: Way, verifier: str, draws: random.Random) -> Drafter:
    """The drafter that a way names; with `match` a draft says its best token, which is accepted most often."""
    model = ModelDrafter(draft, Fixed(way.length), way.sampler, draws.random, argmax=verifier == "match")
    if way.drafter == "lookup":
        return LookupDrafter(way.length)
    if way.drafter == "both":
        return FirstThen(LookupDrafter(way.length, shortest=2), model)
    if way.drafter == "tree":
        return TreeDrafter(draft, way.sampler, draws.random, 2 * way.length, depth=way.length)
    return model


def constrained_drafter(
    draft: Model, way: Way, verifier: str, draws: random.Random, constraint: Constraint
) -> Drafter:
    """The same where a grammar rules: the draft obeys it too, and what the grammar is sure of is drafted for free."""
    return Forced(make_drafter(Constrained(draft, constraint), way, verifier, draws), constraint)


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
    rules = Rules(way.sampler, verifier, ends, draws.random, stopper(tokenizer, way.stop), grammar)
    result = Decoded()
    hidden = () if grammar is None else grammar.ends  # what is printed is a text of the grammar
    if way.length == 0:
        print(text, end="", flush=True)
        result = plain(target, ids, room, rules=rules)
        print(tokenizer.decode([token for token in result.tokens if token not in hidden]))
    else:
        try:
            if foreign:
                drafter = foreign_drafter(recipe, references, way, verifier, draws)
            elif grammar is not None:
                drafter = constrained_drafter(draft, way, verifier, draws, grammar)
            else:
                drafter = make_drafter(draft, way, verifier, draws)
            require_lossless(drafter, rules)
        except ValueError as error:
            raise DataError(f"this cannot be drafted: {error}", "choose another --drafter or --verifier") from None
        print(text, end="", flush=True)
        _show(tokenizer, result, decode(target, drafter, ids, room, rules, result), sys.stdout.isatty(), hidden)
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
