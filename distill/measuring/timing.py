"""The measurement of one pair by one backend: plain against speculative decoding on the same prompts.

Stage `speedup` makes it for each pair and backend of a run and `distill speedup TARGET DRAFT` for any two
models (speedup.py). Legend: γ drafted tokens of a round, T target.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from distill.decoding.calibration import Calibration
from distill.decoding.configured import NO_COSTS, Fitted, require_trees
from distill.decoding.costs import Costs
from distill.decoding.ngrams import NGramTable
from distill.decoding.other_vocabulary import DraftReader
from distill.decoding.round_costs import PROMPTS, pair_costs
from distill.engines.loaded import LoadedPair
from distill.engines.model import Model, Watch
from distill.measuring.compare import (
    PairSettings,
    TimedText,
    judge_identity,
    measurement,
    prepare_all,
    time_steps,
    time_texts,
)
from distill.measuring.identity import measured_rounding
from distill.measuring.speedup_results import PairMeasured, SpeedupPart

REPEATS = 7  # of a timed step, at most: 3 where their median lies within 5 % of the fastest


@dataclass(frozen=True)
class PairTexts:
    """On which prompts a pair is measured, and what is known of them.

    Costs are timed behind `spare` prompts. `fits` are calibrations by name. `classes` are those of the prompts, where
    they are to be told apart. `table` holds n-grams of the target's other texts, where there are any.
    """

    prompts: list[list[int]]
    spare: list[list[int]]
    fits: Mapping[str, Calibration] = field(default_factory=dict)
    classes: Sequence[str] = ()
    table: NGramTable | None = None


def measure_pair(
    settings: PairSettings,
    pair: LoadedPair,
    label: PairMeasured,
    given: PairTexts,
    reader: DraftReader | None = None,
) -> SpeedupPart:
    """Measure a loaded pair; `reader` is a draft of another vocabulary.

    Raises DataError for trees in models that take none and for contexts without room.
    """
    if any(one.branches for one in settings.configurations):
        require_trees(pair.target, pair.draft)
    prompts, new_tokens = given.prompts, settings.speedup.new_tokens
    fitted = _fitted(pair, given, _timed_costs(settings, pair, given))
    small: Model = pair.draft if reader is None else reader.model
    watch = Watch()
    target, draft = watch.models(pair.target, small)
    drafting: Model | DraftReader = draft
    if reader is not None:
        drafting = copy.copy(reader)
        drafting.model = draft
    prepared = prepare_all(settings, target, drafting, pair.ends, fitted)
    with_room = draft if reader is None else target  # a draft of another vocabulary checks its own room
    time_texts(target, with_room, prompts, new_tokens, prepared, f"{pair.backend}, prompts", watch, stop=True)
    plain = prepared[0].texts[0].decoded.tokens
    rounding = measured_rounding(settings.target, pair.backend, pair.target, prompts[0], plain, settings.configurations)
    identities = judge_identity(pair.target, prompts, prepared, rounding)
    steps = time_steps(prepared, pair.target, None if small is pair.target else small, REPEATS)
    waits = pair.hugging_face is None or pair.hugging_face[0].device.type == "cpu"
    rows = [
        measurement(one, identity, steps, label, prompts, given.classes, waits)
        for one, identity in zip(prepared, identities, strict=True)
    ]
    return SpeedupPart(*label.key, rows, steps, target=settings.target.model, draft=settings.draft)


def time_again(
    settings: PairSettings, pair: LoadedPair, places: Collection[int], given: PairTexts
) -> dict[int, list[TimedText]]:
    """Decode prompts by the configurations at these places of the table once more, with the costs that are kept of the
    pair."""
    longest = _longest_priced(settings)
    costs = pair_costs(pair, given.prompts[:1], longest) if longest else NO_COSTS
    prepared = prepare_all(settings, pair.target, pair.draft, pair.ends, _fitted(pair, given, costs))
    wanted = {place: prepared[place] for place in places}
    new_tokens, title = settings.speedup.new_tokens, f"{pair.backend}, prompts of a turn"
    time_texts(pair.target, pair.draft, given.prompts, new_tokens, [*wanted.values()], title)
    return {place: one.texts for place, one in wanted.items()}


def _longest_priced(settings: PairSettings) -> int:
    """The longest round that a configuration reckons with; 0 where none reads costs."""
    return max((one.longest_round for one in settings.configurations if one.needs_costs), default=0)


def _timed_costs(settings: PairSettings, pair: LoadedPair, given: PairTexts) -> Costs:
    """The costs of rounds that configurations read, as they are kept, or timed behind `spare` prompts and kept."""
    longest = _longest_priced(settings)
    if not longest:
        return NO_COSTS
    ordered = sorted(given.spare, key=len)  # deeper rounds cost more
    spare = [ordered[len(ordered) * (2 * index + 1) // (2 * PROMPTS)] for index in range(PROMPTS)]
    return pair_costs(pair, spare, longest, settings.speedup.new_tokens)


def _fitted(pair: LoadedPair, given: PairTexts, costs: Costs) -> Fitted:
    return Fitted(costs.of_target(pair.target), given.fits, given.table, pair.target.max_leaves)
