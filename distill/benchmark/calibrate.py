"""Measured on decoded validation text: calibrations and acceptance by rank.

Legend: γ or n drafted tokens of a round, T target, D draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any, Literal

from distill.errors import DataError
from distill.files import has_form, read_json, write_json
from distill.models.base import Model
from distill.models.loaded import LoadedPair, load_pair
from distill.packing import Packed
from distill.progress import Progress
from distill.recipe import Configuration, Recipe
from distill.results.serialise import from_json, read_result
from distill.results.speedup_results import PairMeasured, RoundCosts, SpeedupPart
from distill.run import Run
from distill.speculative.calibration import (
    FITTED,
    Calibration,
    Recorder,
    expected_calibration_error,
    fit_calibration,
    log_loss,
    predicted,
)
from distill.speculative.costs.curve import StepCosts
from distill.speculative.costs.paid import DraftSteps, PaidCosts
from distill.speculative.decode import decode_text, room_for
from distill.speculative.draft import ModelDrafter, distribution_sampler
from distill.speculative.proposal import ROOT, Proposal, best_tokens
from distill.speculative.rules import GREEDY, Rules
from distill.speculative.trees.shape import RankTally
from distill.texts import read_prompts

FORMAT = 1
FORM = {"format": int, "fits": {...: {"kind": str, "fields": dict}}}  # of a calibration.json
LENGTH = 8  # tokens drafted in every recorded round
RANKS = 8  # of the draft's best tokens that are tallied
Text = tuple[list[int], list[int]]  # a prompt, and what the target wrote after it


@dataclass(frozen=True)
class Fit:
    """A calibration as calibration.json holds it, beside how it does on text new to it."""

    kind: Literal["Logistic"]
    fields: Calibration


def record_rounds(
    target: Model, draft: Model, prompts: Sequence[Sequence[int]], new_tokens: int, rules: Rules
) -> list[Recorder]:
    """Decode every prompt with LENGTH drafted tokens a round; the rounds of each."""
    recorders, progress = [], Progress("rounds of other texts, prompts", len(prompts), brief=True)
    for prompt in prompts:
        recorder = Recorder(LENGTH)
        drafter = ModelDrafter(draft, recorder, rules.sampler, rules.random, argmax=rules.verifier == "match")
        limit = room_for(target, draft, len(prompt), new_tokens)
        recorder.tokens = decode_text(target, drafter, prompt, limit, rules).tokens
        recorders.append(recorder)
        progress.step()
    return recorders


def tally_ranks(draft: Model, prompts: Sequence[Sequence[int]], own: Sequence[Recorder], rules: Rules) -> RankTally:
    """Which of the draft's RANKS best tokens the target wrote, at every place of the recorded texts that is drafted.

    That is all but the first new token, which the target's reading of the prompt gives.
    """
    tally, sampler = RankTally(), distribution_sampler(rules.sampler)
    for prompt, recorder in zip(prompts, own, strict=True):
        text = [*prompt, *recorder.tokens]
        places = range(len(prompt), len(text) - 1)
        if not places:
            continue
        draft.rollback([0])
        distributions = sampler.distributions(
            draft.extend(text[:-1], want=places), [text[: place + 1] for place in places], empty=True
        )
        for place, distribution in zip(places, distributions, strict=True):
            best = best_tokens(distribution, RANKS)[0]
            wrote = text[place + 1]
            star = Proposal(best, [ROOT] * len(best))
            tally.observe(star, [best.index(wrote)] if wrote in best else [])
    return tally


def validation_prompts(run: Run, tokens: int, count: int) -> list[list[int]]:
    """`count` validation prompts: questions of conversations, as the template writes them, before pieces of text.

    The pieces have `tokens` tokens, first ones of all documents, then later ones.
    """
    asked = [prompt.ids for prompt in read_prompts(run, "validation") if prompt.chat is not None]
    blocks = Packed.load(run.path("corpus", "text-validation.safetensors"))
    pieces: list[tuple[int, list[int]]] = []
    for ids, documents in zip(blocks.ids, blocks.documents, strict=True):
        for document in range(int(documents.max()) + 1):
            text = ids[documents == document].tolist()
            starts = range(0, len(text) - tokens, 2 * tokens)
            pieces += [(piece, text[start : start + tokens]) for piece, start in enumerate(starts)]
    pieces.sort(key=lambda piece: piece[0])
    return [*asked, *(ids for _, ids in pieces)][:count]


def calibrate(own: Sequence[Recorder], command: str, ranks: RankTally | None = None) -> dict[str, Any]:
    """What calibration.json holds: every calibration fitted on all rounds, and how it does on text new to it.

    `log_loss` (nats) and `calibration_error` are of fits on the even prompts, scored on the odd ones; those of
    `uncalibrated`, the draft's own probability, stand beside them. `unfitted` gives the reason where the rounds do not
    allow a fit, for instance without both outcomes among them. `ranks` go in as they are.
    """
    rounds = [[*recorder.rounds] for recorder in own]
    everything, even, odd = ([one for prompt in some for one in prompt] for some in (rounds, rounds[::2], rounds[1::2]))
    judged = sum(len(one.judged()) for one in everything)
    table: dict[str, Any] = {"format": FORMAT, "command": command, "split": "validation", "prompts": len(own)}
    table |= {"rounds": len(everything), "judged": judged, "fits": {}, "unfitted": {}}

    def scored(calibration: Calibration) -> dict[str, float]:
        probabilities, accepted = predicted(calibration, odd)
        if not probabilities:
            raise DataError("no judged position in the odd-numbered texts, which score a fit", "give more prompts")
        return {
            "log_loss": log_loss(probabilities, accepted),
            "calibration_error": expected_calibration_error(probabilities, accepted),
        }

    for name, terms in FITTED.items():
        try:
            fit = Fit("Logistic", fit_calibration(everything, terms))
            table["fits"][name] = asdict(fit) | scored(fit_calibration(even, terms))
        except DataError as error:
            table["unfitted"][name] = error.what
    if table["fits"]:
        table["uncalibrated"] = scored(Calibration())
    if ranks is not None:
        table["ranks"] = asdict(ranks)
    return table


@dataclass(frozen=True)
class Calibrated:
    """What calibration.json holds (`table`), and the texts it was counted on: prompts, and what the target wrote.

    `source` names the table in errors.
    """

    table: dict[str, Any]
    texts: list[Text]
    source: str = "the calibration"

    @property
    def of_texts(self) -> str:
        """The texts, in words."""
        split = self.table.get("split", "validation")
        return "validation text" if split == "validation" else f"other {split}"


def calibrate_pair(
    pair: LoadedPair, prompts: Sequence[Sequence[int]], new_tokens: int, command: str, split: str
) -> Calibrated:
    """Decode the prompts, of this `split`, greedily, and fit every calibration on their rounds."""
    rules = Rules(GREEDY, "greedy", pair.ends)
    recorded = record_rounds(pair.target, pair.draft, prompts, new_tokens, rules)
    table = calibrate(recorded, command, tally_ranks(pair.draft, prompts, recorded, rules))
    texts = [([*prompt], recorder.tokens) for prompt, recorder in zip(prompts, recorded, strict=True)]
    return Calibrated(table | {"split": split}, texts)


def need_calibration(configurations: Sequence[Configuration]) -> bool:
    """Whether some configuration reads what is counted on other texts beforehand."""
    return any(one.needs_calibration or one.needs_tree_choice for one in configurations)


def calibrate_run(recipe: Recipe, run: Run) -> Calibrated | None:
    """The run's speedup/calibration.json and validation.json, made on validation text if they are not there yet.

    None where no configuration reads them.
    """
    settings = recipe.speedup
    if not need_calibration(settings.configurations):
        return None
    path, texts = run.path("speedup", "calibration.json"), run.path("speedup", "validation.json")
    if not path.exists():
        prompts = validation_prompts(run, recipe.answers.prompt_tokens, settings.calibration_prompts)
        with load_pair(recipe.target, str(run.path("draft")), device=recipe.device, pytorch=recipe.pytorch) as pair:
            made = calibrate_pair(pair, prompts, settings.new_tokens, run.command, "validation")
        save_texts(texts, made.texts)
        write_json(path, made.table)
    calibrated = Calibrated(read_json(path, FORM), load_texts(texts), str(path))
    table = calibrated.table
    scores = ", ".join(f"{name} {fit['log_loss']:.3f}" for name, fit in table["fits"].items())
    line = f"log loss {table['uncalibrated']['log_loss']:.3f} uncalibrated, {scores}" if scores else "no calibration"
    line += "".join(f"; {name} not fitted: {reason}" for name, reason in table["unfitted"].items())
    run.say(f"  draft probabilities, {table['rounds']} rounds of {table['prompts']} validation texts: {line}")
    return calibrated


def read_calibrations(table: Mapping[str, Any], source: str) -> dict[str, Calibration]:
    """The calibrations of what `calibrate` made; DataError, which names `source`, for another format."""
    if table.get("format") != FORMAT:
        what = f"{source} holds no calibrations: its format is {table.get('format')}"
        raise DataError(what, "make it again: `distill speedup --again`")
    return {name: fit.fields for name, fit in from_json(table.get("fits"), dict[str, Fit], source).items()}


def load_calibrations(path: Path) -> dict[str, Calibration]:
    """The calibrations of a calibration.json by name; raises DataError when it is damaged or of another format."""
    return read_calibrations(read_json(path, FORM), str(path))


def read_ranks(table: Mapping[str, Any], source: str) -> RankTally:
    """The acceptance by rank of what `calibrate` made; DataError, which names `source`, where there is none."""
    tally: Any = table.get("ranks")
    if not has_form(tally, {"tried": [int], "taken": [int]}) or not tally["tried"]:
        raise DataError(f"{source} holds no acceptance by rank", "make it again: `distill speedup --again`")
    return RankTally(tally["tried"], tally["taken"])


def save_texts(path: Path, texts: Sequence[Text]) -> None:
    """Write recorded texts as token ids; see `load_texts`."""
    write_json(path, {"split": "validation", "texts": [{"prompt": prompt, "new": new} for prompt, new in texts]})


def load_texts(path: Path) -> list[Text]:
    """Prompts, and what the target wrote after each; raises DataError when the file is missing or damaged."""
    texts = read_json(path, {"texts": [{"prompt": [int], "new": [int]}]})["texts"]
    return [(text["prompt"], text["new"]) for text in texts]


def run_costs(run: Run, backend: str) -> StepCosts | None:
    """What rounds of a run's pair pay, as stage speedup measured it; None before it has."""
    path = run.path("speedup", f"{backend}.json")
    if not path.exists():
        return None
    stored = read_result(path, SpeedupPart).costs
    verify = dict(zip(stored.lengths, stored.verify, strict=True))
    steps = DraftSteps(*stored.by_argmax), DraftSteps(*stored.by_distribution)
    return PaidCosts(stored.token, verify, *steps, stored.target_prompt, stored.draft_prompt).step_costs()


def round_costs(paid: PaidCosts, pair: PairMeasured) -> RoundCosts:
    """Costs as speedup.json keeps them."""
    verify = [*paid.verify], [*paid.verify.values()]
    steps = [*astuple(paid.by_argmax)], [*astuple(paid.by_distribution)]
    return RoundCosts(*pair.key, paid.token, *verify, *steps, paid.target_prompt, paid.draft_prompt)
