"""Calibrations, fitted on other texts than the measured ones."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from distill.data.packing import Packed
from distill.data.samples import read_prompts
from distill.decoding.calibration import (
    FITTED,
    TABLE_TERMS,
    Calibration,
    Recorded,
    expected_calibration_error,
    fit_calibration,
    log_loss,
    predicted,
)
from distill.decoding.configured import (
    configured_sampler,
    guesses,
    names_of_fits,
)
from distill.decoding.ngrams import NGramTable
from distill.decoding.rules import GREEDY, Rules
from distill.engines.loaded import LoadedPair, load_pair
from distill.engines.model import Model
from distill.errors import DataError
from distill.files import from_json, read_json, write_json
from distill.measuring.compare import PairSettings
from distill.measuring.measure import rounds_of, write_texts
from distill.progress import Progress
from distill.recipe import Configuration, Recipe
from distill.run import Run
from distill.sampler import Sampler

FORMAT = 1
FORM = {"format": int, "fits": {...: {"kind": str, "fields": dict}}}  # of a calibration.json
LENGTH = 8  # tokens drafted in every recorded round
Text = tuple[list[int], list[int]]  # a prompt, and what the target wrote after it


@dataclass(frozen=True)
class Fit:
    """A calibration as calibration.json holds it, beside how it does on text new to it."""

    kind: Literal["Logistic"]
    fields: Calibration


def record_rounds(draft: Model, texts: Sequence[Text], ends: Collection[int]) -> list[list[Recorded]]:
    """The rounds of LENGTH drafted tokens in which greedy decoding writes each text.

    The draft reads each text once: at every position that a round judges, all before it were accepted.
    """
    recorded, sampler = list[list[Recorded]](), Sampler(1.0)
    progress = Progress("rounds of other texts, prompts", len(texts), brief=True)
    for prompt, new in texts:
        text = [*prompt, *new][: draft.capacity]
        places = range(len(prompt), len(text) - 1)
        draft.rollback([0])
        logits = draft.extend(text[:-1], want=places) if places else None
        distributions = [] if logits is None else [*sampler.distributions(logits, empty=True)]
        recorded.append(rounds_of(text, len(prompt), distributions, ends, LENGTH))
        progress.step()
    return recorded


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


def calibrate(
    of_draft: Sequence[Sequence[Recorded]],
    command: str,
    counted: Mapping[str, Sequence[Sequence[Recorded]]] | None = None,
) -> dict[str, Any]:
    """What calibration.json holds: every calibration fitted on all rounds, and how it does on text new to it.

    `log_loss` (nats) and `calibration_error` are of fits on the even prompts, scored on the odd ones; those of
    `uncalibrated`, the draft's own probability, stand beside them. `unfitted` gives the reason where the rounds do not
    allow a fit, for instance without both outcomes among them. `counted` are the guesses of a table of n-grams at the
    texts, by the name of the calibration that they get.
    """
    judged = sum(len(one.judged()) for one in chain.from_iterable(of_draft))
    table: dict[str, Any] = {"format": FORMAT, "command": command, "split": "validation", "prompts": len(of_draft)}
    table |= {"rounds": sum(map(len, of_draft)), "judged": judged, "fits": {}, "unfitted": {}}

    def scored(calibration: Calibration, rounds: Sequence[Sequence[Recorded]]) -> dict[str, float]:
        probabilities, accepted = predicted(calibration, [*chain.from_iterable(rounds[1::2])])
        if not probabilities:
            raise DataError("no judged position in the odd-numbered texts, which score a fit", "give more prompts")
        return {
            "log_loss": log_loss(probabilities, accepted),
            "calibration_error": expected_calibration_error(probabilities, accepted),
        }

    fits = [(name, terms, of_draft) for name, terms in FITTED.items() if of_draft]
    fits += [(name, TABLE_TERMS, rounds) for name, rounds in (counted or {}).items()]
    for name, terms, rounds in fits:
        try:
            fit = Fit("Logistic", fit_calibration([*chain.from_iterable(rounds)], terms))
            half = [*chain.from_iterable(rounds[::2])]
            table["fits"][name] = asdict(fit) | scored(fit_calibration(half, terms), rounds)
        except DataError as error:
            table["unfitted"][name] = error.what
    if table["fits"].keys() & FITTED.keys():
        table["uncalibrated"] = scored(Calibration(), of_draft)
    return table


def calibrate_pair(
    pair: LoadedPair,
    prompts: Sequence[Sequence[int]],
    settings: PairSettings,
    command: str,
    split: str,
    table: NGramTable | None,
) -> dict[str, Any]:
    """Decode the prompts, of this `split`, greedily, and fit the calibrations of draft and table on their rounds.

    Where a table drafts for a sampler, too, its chances are fitted on texts drawn with it, which hold more surprises.
    """
    rules, new_tokens = Rules(GREEDY, "greedy", pair.ends), settings.speedup.new_tokens
    written = write_texts(pair.target, prompts, new_tokens, rules)
    texts = [([*prompt], new) for prompt, new in zip(prompts, written, strict=True)]
    recorded = [] if settings.draft is None else record_rounds(pair.draft, texts, pair.ends)
    counted: dict[str, Sequence[Sequence[Recorded]]] = {}
    tables = [one for one in settings.configurations if one.counts_ngrams]
    for sampler in dict.fromkeys(configured_sampler(one, settings.sampler) for one in tables):
        names, new = names_of_fits(sampler.temperature > 0), written
        if sampler.temperature:
            draws = random.Random(f"{settings.seed}/{names[0]}").random
            new = write_texts(pair.target, prompts, new_tokens, Rules(sampler, "token", pair.ends, draws))
        made = [guesses(table, prompt, text) for prompt, text in zip(prompts, new, strict=True)]
        counted |= zip(names, zip(*made, strict=True), strict=True)
    return calibrate(recorded, command, counted) | {"split": split, "prompts": len(texts)}


def need_calibration(configurations: Sequence[Configuration]) -> bool:
    """Whether some configuration reads what is counted on other texts beforehand."""
    return any(one.needs_calibration for one in configurations)


def calibrate_run(
    recipe: Recipe, run: Run, pair_settings: PairSettings, table: NGramTable | None
) -> dict[str, Any] | None:
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
            made = calibrate_pair(pair, prompts, pair_settings, run.command, "validation", table)
        write_json(path, made)
    found: dict[str, Any] = read_json(path, FORM)
    run.say(f"  probabilities calibrated on {described(found)}")
    return found


def described(table: Mapping[str, Any] | None) -> str:
    """What was fitted on which texts, how well it does on text new to it, and what could not be; empty for None."""
    if table is None:
        return ""
    scores = {name: f"{fit['log_loss']:.3f}" for name, fit in table["fits"].items()}
    if "uncalibrated" in table:
        scores = {"uncalibrated": f"{table['uncalibrated']['log_loss']:.3f}", **scores}
    line = "log loss " + ", ".join(f"{name} {loss}" for name, loss in scores.items()) if scores else "no calibration"
    line += "".join(f"; {name} not fitted: {reason}" for name, reason in table["unfitted"].items())
    return f"{table['prompts']} texts of {table['split']}, {table['rounds']} rounds of the draft: {line}"


def read_calibrations(table: Mapping[str, Any], source: str) -> dict[str, Calibration]:
    """The calibrations of what `calibrate` made; DataError, which names `source`, for another format."""
    if table.get("format") != FORMAT:
        what = f"{source} holds no calibrations: its format is {table.get('format')}"
        raise DataError(what, "make it again: `distill train RECIPE --redo speedup`")
    return {name: fit.fields for name, fit in from_json(table.get("fits"), dict[str, Fit], source).items()}


def load_calibrations(path: Path) -> dict[str, Calibration]:
    """The calibrations of a calibration.json by name; raises DataError when it is damaged or of another format."""
    return read_calibrations(read_json(path, FORM), str(path))
