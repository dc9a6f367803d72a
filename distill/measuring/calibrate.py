"""Calibrations, fitted on other texts than the measured ones."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distill.data.packing import Packed
from distill.data.samples import read_prompts
from distill.decoding.calibration import (
    FITTED,
    TABLE_TERMS,
    UNFITTED,
    Calibration,
    Recorded,
    fit_calibration,
    log_loss,
    predicted,
)
from distill.decoding.configured import (
    configured_sampler,
    guesses,
    name_of_fit,
    names_of_fits,
)
from distill.decoding.ngrams import NGramTable
from distill.decoding.rules import Rules
from distill.engines.loaded import LoadedPair, load_pair
from distill.errors import DataError
from distill.files import read_result, write_result
from distill.measuring.compare import PairSettings
from distill.measuring.measure import LENGTH, decode_rounds, record_rounds, write_texts
from distill.recipe import Configuration, Recipe
from distill.run import Run
from distill.sampler import Sampler

NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Calibrations:
    """What speedup/calibration.json holds: `fits` on all rounds of the draft, and the guesses of a table, by name.

    `log_loss` (nats) is of fits on the even prompts, scored on the odd ones, beside that of `uncalibrated`, the draft's
    own probability. `unfitted` gives the reason where the rounds do not allow a fit, for instance without both outcomes
    among them.
    """

    texts: str
    rounds: int
    fits: dict[str, Calibration]
    log_loss: dict[str, float]
    unfitted: dict[str, str]

    @property
    def words(self) -> str:
        """What was fitted on which texts, how well it does on text new to it, and what could not be fitted."""
        scores = ", ".join(f"{name} {loss:.3f}" for name, loss in self.log_loss.items())
        line = f"log loss {scores}" if scores else "no calibration"
        line += "".join(f"; {name} not fitted: {reason}" for name, reason in self.unfitted.items())
        return f"{self.texts}, {self.rounds} rounds of the draft: {line}"


def validation_prompts(run: Run, tokens: int, count: int) -> list[list[int]]:
    """`count` validation prompts: questions of conversations, as the template writes them, before pieces of text.

    The pieces have `tokens` tokens, first ones of all documents, then later ones.
    """
    asked = [one.prompt for one in read_prompts(run, "validation") if one.chat is not None]
    blocks = Packed.load(run.path("corpus", "text-validation.safetensors"))
    pieces: list[tuple[int, list[int]]] = []
    for ids, documents in zip(blocks.ids, blocks.documents, strict=True):
        for document in range(int(documents.max()) + 1):
            text = ids[documents == document].tolist()
            starts = range(0, len(text) - tokens, 2 * tokens)
            pieces += [(piece, text[start : start + tokens]) for piece, start in enumerate(starts)]
    pieces.sort(key=lambda piece: piece[0])
    return [*asked, *(ids for _, ids in pieces)][:count]


Rounds = Sequence[Sequence[Recorded]]  # of each text


def calibrate(drafted: Mapping[str, Rounds], texts: str, counted: Mapping[str, Rounds] = NONE) -> Calibrations:
    """Fit on the rounds of each text, which `texts` describes.

    `drafted` are those of a draft, by what the names of their calibrations end with; `counted` the guesses of a table
    of n-grams at the texts, by the name of the calibration that they get.
    """
    found = Calibrations(texts, sum(len(text) for rounds in drafted.values() for text in rounds), {}, {}, {})

    def score(calibration: Calibration, rounds: Rounds) -> float:
        probabilities, accepted = predicted(calibration, [*chain.from_iterable(rounds[1::2])])
        if not probabilities:
            raise DataError("no judged position in the odd-numbered texts, which score a fit", "give more prompts")
        return log_loss(probabilities, accepted)

    fits = [(name + end, terms, rounds) for end, rounds in drafted.items() for name, terms in FITTED.items()]
    for name, terms, rounds in [*fits, *((name, TABLE_TERMS, rounds) for name, rounds in counted.items())]:
        try:
            fit = fit_calibration([*chain.from_iterable(rounds)], terms)
            half = fit_calibration([*chain.from_iterable(rounds[::2])], terms)
            if name.startswith("features"):
                found.log_loss[name.replace("features", "uncalibrated")] = score(UNFITTED, rounds)
            found.log_loss[name] = score(half, rounds)
            found.fits[name] = fit
        except DataError as error:
            found.unfitted[name] = error.what
    return found


def calibrate_pair(
    pair: LoadedPair, prompts: Sequence[Sequence[int]], settings: PairSettings, split: str, table: NGramTable | None
) -> Calibrations:
    """Decode the prompts, of this `split`, and fit the calibrations of draft and table on their rounds.

    Each configuration's are fitted under its own sampler and verifier: drawn texts hold more surprises than greedy
    ones. Those of other samplers are not fitted.
    """
    new_tokens, drafted, counted = settings.speedup.new_tokens, dict[str, Rounds](), dict[str, Rounds]()

    @cache
    def written(sampler: Sampler) -> list[list[int]]:
        draws = random.Random(f"{settings.seed}/{names_of_fits(sampler.temperature > 0)[0]}").random
        rules = Rules(sampler, "token" if sampler.temperature else "greedy", pair.ends, draws)
        return write_texts(pair.target, prompts, new_tokens, rules)

    for one in settings.configurations:
        sampler = configured_sampler(one, settings.sampler)
        end = name_of_fit(one, sampler).removeprefix(one.calibrated_by)
        if one.counts_ngrams:
            made = [guesses(table, prompt, text) for prompt, text in zip(prompts, written(sampler), strict=True)]
            counted |= zip(names_of_fits(sampler.temperature > 0), zip(*made, strict=True), strict=True)
        if not (one.needs_calibration and one.asks_the_draft) or end in drafted:
            continue
        draws = random.Random(f"{settings.seed}/{end}").random
        if sampler.temperature == 0 or one.verified_by in ("token", "match"):
            texts = [([*prompt], new) for prompt, new in zip(prompts, written(sampler), strict=True)]
            drawn = pair.target if one.verified_by == "token" and sampler.temperature else None
            drafted[end] = record_rounds(pair.draft, texts, pair.ends, sampler, drawn, draws)
        else:
            rules, title = Rules(sampler, one.verified_by, pair.ends, draws), "rounds of other texts, drawn, prompts"
            drafted[end] = decode_rounds(pair.target, pair.draft, prompts, LENGTH, new_tokens, rules, title)
    return calibrate(drafted, f"{len(prompts)} texts of {split}", counted)


def need_calibration(configurations: Sequence[Configuration]) -> bool:
    """Whether some configuration reads what is counted on other texts beforehand."""
    return any(one.needs_calibration for one in configurations)


def calibrate_run(
    recipe: Recipe, run: Run, pair_settings: PairSettings, table: NGramTable | None
) -> Calibrations | None:
    """The run's speedup/calibration.json, made on validation text if it is not there yet.

    None where no configuration reads it.
    """
    settings = recipe.speedup
    if not need_calibration(settings.configurations):
        return None
    path = run.path("speedup", "calibration.json")
    if not path.exists():
        prompts = validation_prompts(run, recipe.answers.prompt_tokens, settings.prompts)
        with load_pair(recipe.target, str(run.path("draft")), device=recipe.device, pytorch=recipe.pytorch) as pair:
            write_result(path, calibrate_pair(pair, prompts, pair_settings, "validation", table))
    found = read_result(path, Calibrations)
    run.say(f"  probabilities calibrated on {found.words}")
    return found


def load_calibrations(path: Path) -> dict[str, Calibration]:
    """The calibrations of a calibration.json by name; raises DataError when it is damaged or of another form."""
    return read_result(path, Calibrations).fits
