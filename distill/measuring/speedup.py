"""Stage `speedup`: plain and speculative decoding of the run's target and draft, by each backend. And of any pair."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from distill.data.prompts import UserPrompts, read_user_prompts, sources_of
from distill.data.samples import read_prompts
from distill.data.suites import SuitePrompts, read_suite, suite_prompts
from distill.decoding.calibration import (
    FITTED_TERMS,
    TABLE_TERMS,
    UNFITTED,
    Calibration,
    Recorded,
    fit_calibration,
    log_loss,
    predicted,
)
from distill.decoding.configured import check_configurations, configured_sampler, name_of_fit
from distill.decoding.ngrams import NGramTable, open_table
from distill.decoding.other_vocabulary import read_with
from distill.decoding.round_costs import PROMPTS
from distill.decoding.rules import rules_of_pair
from distill.decoding.table_drafter import guesses, names_of_fits
from distill.engines.ends import target_ends
from distill.engines.llama_cpp.model import MOST_LEAVES
from distill.engines.loaded import LoadedPair, growing_decoder, load_pair, room_for_prompts, settled_decoding
from distill.engines.torch.blocks import Packed
from distill.engines.torch.hugging_face import load_tokenizer
from distill.errors import DataError, RecipeError
from distill.files import read_result, write_result, write_text
from distill.gguf.importing import file_type
from distill.gguf.writer import target_gguf
from distill.machine import machine
from distill.measuring.compare import PairSettings, PairTexts, TimedText, measure_pair, time_again, totals
from distill.measuring.evaluation import LENGTH, decode_rounds, record_rounds, write_texts
from distill.measuring.identity import OwnDistributions, files_in_types, kl_of_bits
from distill.measuring.speedup_results import InTurns, PairMeasured, SpeedupPart, SpeedupReport, speedup_of
from distill.measuring.speedup_tables import speedup_blocks
from distill.measuring.verdict import explain, verdict
from distill.recipe import Chat, Configuration, Corpus, Recipe, Target
from distill.run import Run
from distill.sampler import Sampler
from distill.tables import document, shown, speed_ratio

# ── Calibrations, fitted on other texts than the measured ones ──

NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Calibrations:
    """speedup/calibration.json: the calibrations of the draft, and of a table's guesses, by name.

    They are fitted on all rounds. `log_loss` (nats) belongs to fits on the even prompts, scored on the odd ones. A fit
    that scores no better than a simpler calibration is not used. Its name then stands for the simpler calibration, or
    for none if the draft's own probability is best. `unfitted` gives this reason, or why the rounds allow no fit.
    """

    texts: str
    rounds: int
    fits: dict[str, Calibration]
    log_loss: dict[str, float]
    unfitted: dict[str, str]

    @property
    def words(self) -> str:
        """State what was fitted on which texts, its scores on new text, and what is not used."""
        scores = ", ".join(f"{name} {loss:.3f}" for name, loss in self.log_loss.items())
        line = f"log loss {scores}" if scores else "no calibration"
        line += "".join(f"; {name} not used: {reason}" for name, reason in self.unfitted.items())
        return f"{self.texts}, {self.rounds} rounds of the draft: {line}"


def validation_prompts(run: Run, tokens: int, count: int) -> list[list[int]]:
    """Return `count` validation prompts: questions of conversations, in the template's form, then pieces of text.

    The pieces have `tokens` tokens. The first pieces of all documents come before later pieces.
    """
    asked = [sample.prompt for sample in read_prompts(run, "validation") if sample.chat is not None]
    blocks = Packed.load(run.path("corpus", "text-validation.safetensors"))
    pieces: list[tuple[int, list[int]]] = []
    for ids, documents in zip(blocks.ids, blocks.documents, strict=True):
        for number in range(int(documents.max()) + 1):
            text = ids[documents == number].tolist()
            starts = range(0, len(text) - tokens, 2 * tokens)
            pieces += [(piece, text[start : start + tokens]) for piece, start in enumerate(starts)]
    pieces.sort(key=lambda piece: piece[0])
    return [*asked, *(ids for _, ids in pieces)][:count]


Rounds = Sequence[Sequence[Recorded]]  # the rounds of each text


def calibrate(drafted: Mapping[str, Rounds], texts: str, counted: Mapping[str, Rounds] = NONE) -> Calibrations:
    """Fit calibrations on the rounds of each text, and choose by their scores. `texts` describes the texts.

    `drafted` holds a draft's rounds, by the ending of their calibrations' names. `counted` holds the guesses of an
    n-gram table at the texts, by the name of the calibration that they get.
    """
    chosen = Calibrations(texts, sum(len(text) for rounds in drafted.values() for text in rounds), {}, {}, {})
    # The simplest calibration comes first. With terms None it is the drafter's own probability, with no terms a
    # constant. A table has no probability that one of its other guesses is right.
    ways: list[tuple[dict[str, Sequence[str] | None], Rounds]] = [
        ({f"uncalibrated{end}": None} | {name + end: terms for name, terms in FITTED_TERMS.items()}, rounds)
        for end, rounds in drafted.items()
    ]
    for name, rounds in counted.items():
        simplest = {f"constant, {name}": ()} if "others" in name else {f"uncalibrated, {name}": None}
        ways.append((simplest | {name: TABLE_TERMS}, rounds))
    for candidates, rounds in ways:
        even, odd = ([*chain.from_iterable(rounds[start::2])] for start in (0, 1))
        best, least, simplest_name = UNFITTED, math.inf, next(iter(candidates))
        better = simplest_name
        for name, terms in candidates.items():
            try:
                fit, half = (
                    UNFITTED if terms is None else fit_calibration(part, terms)
                    for part in ([*chain.from_iterable(rounds)], even)
                )
                chosen.log_loss[name] = loss = _score(half, odd)
            except DataError as error:
                if name != simplest_name:
                    chosen.unfitted[name] = error.what
                continue
            if loss < least:
                best, least, better = fit, loss, name
            else:
                chosen.unfitted[name] = f"no better than {better}"
            if best is not UNFITTED and name != simplest_name:
                chosen.fits[name] = best
    return chosen


def _score(calibration: Calibration, rounds: Sequence[Recorded]) -> float:
    probabilities, accepted = predicted(calibration, rounds)
    if not probabilities:
        raise DataError("no judged position in the odd-numbered texts, which score a fit", "give more prompts")
    return log_loss(probabilities, accepted)


def calibrate_pair(
    pair: LoadedPair, prompts: Sequence[Sequence[int]], settings: PairSettings, split: str, table: NGramTable | None
) -> Calibrations:
    """Decode the prompts, which belong to `split`, and fit the calibrations of draft and table on their rounds.

    Each configuration is fitted under its own sampler and verifier, because drawn texts have more surprises than greedy
    texts. Nothing is fitted for other samplers.
    """
    new_tokens, drafted, counted = settings.speedup.new_tokens, dict[str, Rounds](), dict[str, Rounds]()

    @cache
    def written(sampler: Sampler) -> list[list[int]]:
        draws = random.Random(f"{settings.seed}/{names_of_fits(sampler.temperature > 0)[0]}").random
        return write_texts(pair.target, prompts, new_tokens, rules_of_pair(pair, sampler, draws))

    for configuration in settings.configurations:
        sampler = configured_sampler(configuration, settings.sampler)
        end = name_of_fit(configuration, sampler).removeprefix(configuration.calibrated_by)
        if configuration.counts_ngrams:
            made = [guesses(table, prompt, text) for prompt, text in zip(prompts, written(sampler), strict=True)]
            counted |= zip(names_of_fits(sampler.temperature > 0), zip(*made, strict=True), strict=True)
        if not (configuration.needs_calibration and configuration.asks_the_draft) or end in drafted:
            continue
        draws = random.Random(f"{settings.seed}/{end}").random
        if sampler.temperature == 0 or configuration.verified_by in ("token", "match"):
            texts = [([*prompt], new) for prompt, new in zip(prompts, written(sampler), strict=True)]
            drawn = pair.target if configuration.verified_by == "token" and sampler.temperature else None
            drafted[end] = record_rounds(pair.draft, texts, pair.ends, sampler, drawn, draws)
        else:
            rules = replace(rules_of_pair(pair, sampler, draws), verifier=configuration.verified_by)
            title = "rounds of other texts, drawn, prompts"
            drafted[end] = decode_rounds(pair.target, pair.draft, prompts, LENGTH, new_tokens, rules, title)
    return calibrate(drafted, f"{len(prompts)} texts of {split}", counted)


def need_calibration(configurations: Sequence[Configuration]) -> bool:
    """Whether a configuration reads calibrations, which are fitted on other texts beforehand."""
    return any(configuration.needs_calibration for configuration in configurations)


def calibrate_run(
    recipe: Recipe, run: Run, pair_settings: PairSettings, table: NGramTable | None
) -> Calibrations | None:
    """Return the run's speedup/calibration.json. If it does not exist, fit it on validation text.

    Returns None if no configuration reads it.
    """
    settings = recipe.speedup
    if not need_calibration(settings.configurations):
        return None
    path = run.path("speedup", "calibration.json")
    if not path.exists():
        prompts = validation_prompts(run, recipe.answers.prompt_tokens, settings.prompts)
        with load_pair(recipe.target, str(run.path("draft")), device=recipe.device, pytorch=recipe.pytorch) as pair:
            write_result(path, calibrate_pair(pair, prompts, pair_settings, "validation", table))
    calibrations = read_result(path, Calibrations)
    run.say(f"  probabilities calibrated on {calibrations.words}")
    return calibrations


def load_calibrations(path: Path) -> dict[str, Calibration]:
    """Return the calibrations of a calibration.json by name. DataError if it is damaged or of another form."""
    return read_result(path, Calibrations).fits


# ── Stage `speedup`: plain and speculative decoding of the run's target and draft, by each backend ──


def speedup(recipe: Recipe, run: Run) -> list[Path]:
    """Write speedup.json and speedup.md. Each backend's part is kept if the run is interrupted."""
    settings = recipe.speedup
    for line in check_configurations(settings, recipe.sampler):
        run.say(f"  {line}")
    counted = any(configuration.counts_ngrams for configuration in settings.configurations)
    table = open_table(run.folder, recipe.target.model) if counted else None
    calibration = calibrate_run(recipe, run, _settings(recipe, run, "pytorch"), table)
    prompts = [sample.prompt for sample in read_prompts(run, "test")][: settings.prompts]
    spare = validation_prompts(run, recipe.answers.prompt_tokens, PROMPTS)
    if not spare:
        run.say("  there is no validation text, so costs are timed on the test prompts (this does not change them)")
    calibrations = {} if calibration is None else calibration.fits
    given = PairTexts(prompts, spare or prompts, calibrations, table=table)
    # This backend decodes the target in the form in which the user gave it.
    own_backend = "pytorch" if target_gguf(recipe) is None else "gguf"
    reference: OwnDistributions | None = None
    parts = {}
    for backend in sorted(settings.backends, key=lambda backend: backend != own_backend):  # the target's own first
        path = run.path("speedup", f"{backend.replace(':', '-')}.json")
        if path.exists():
            run.say(f"  {backend}: measured before the interruption")
        else:
            how = _settings(recipe, run, backend)
            if backend != own_backend and reference is None:  # The pair has not taken its memory yet.
                reference = _read_own(recipe, run, own_backend, prompts)
            with _load(recipe, how, backend) as pair:
                label = _label(recipe, pair, backend)
                run.say(f"  {label.pair}, {backend}")
                part = replace(measure_pair(how, pair, label, given), pytorch=_settings_of(pair))
                for row in part.measurements:  # The other engines take minutes.
                    gain = "" if row.speedup is None else f", {shown(speedup_of(row), '×')}"
                    run.say(f"    {row.configuration}: {row.tokens_per_second:.1f} tokens/s{gain}")
                run.say(f"    {explain(part)}")
                if reference is not None:
                    part = replace(part, kl=reference.kl(pair.target))
                elif len(settings.backends) > 1:
                    reference = OwnDistributions(pair.target, prompts)
                write_result(path, part)
        parts[backend] = read_result(path, SpeedupPart)
        gc.collect()
    report = SpeedupReport(
        command=run.command,
        machine=machine(),
        prompts=len(prompts),
        new_tokens=settings.new_tokens,
        sampler=Sampler.of(recipe.sampler).describe(),
        parts=[parts[backend] for backend in settings.backends],
        calibration="" if calibration is None else calibration.words,
        gguf=recipe.gguf.described() if settings.files else "",
        pytorch="; ".join(part.pytorch for part in parts.values() if part.pytorch),
        texts="the run's test split",
        table=str(run.folder) if table else "",
    )
    report = replace(report, in_turns=_in_turns(recipe, run, report, given))
    report = replace(report, verdict=verdict(report))
    write_result(run.path("speedup.json"), report)
    write_text(run.path("speedup.md"), document(speedup_blocks(report)))
    return [run.path("speedup"), run.path("speedup.json"), run.path("speedup.md")]


def _in_turns(recipe: Recipe, run: Run, report: SpeedupReport, given: PairTexts) -> list[InTurns]:
    """Time plain decoding and the fastest way of each engine again, in turns, and return them, the fastest first.

    The engines were measured one after another, and a machine's speed changes over minutes. Engines that are far slower
    than the fastest are left out.
    """
    turns, prompts = recipe.speedup.turns, given.prompts
    plain = {row.key: row for row in report.plain if row.key in report.contenders}
    if len(plain) < 2 or turns < 1:
        return []
    repeated = {id(row) for row in (*plain.values(), *(row for row in report.best if row.key in plain))}
    texts: dict[tuple[int, int], list[TimedText]] = {
        (number, place): []
        for number, part in enumerate(report.parts)
        for place, row in enumerate(part.measurements)
        if id(row) in repeated
    }
    run.say(f"  {len(plain)} engines in {turns} turns: plain decoding, and the fastest way of each")
    for turn in range(min(turns, len(prompts))):
        in_turn = replace(given, prompts=prompts[turn::turns])
        for number, backend in enumerate(recipe.speedup.backends):
            if places := [place for part, place in texts if part == number]:
                settings = _settings(recipe, run, backend)
                with _load(recipe, settings, backend) as pair:
                    for place, timed in time_again(settings, pair, places, in_turn).items():
                        texts[number, place] += timed
                gc.collect()
    columns = {way: totals(timed) for way, timed in texts.items()}
    rates = {way: float(tokens.sum() / seconds.sum()) for way, (tokens, seconds) in columns.items()}
    rows = {(number, place): report.parts[number].measurements[place] for number, place in columns}
    base = columns[max((way for way, row in rows.items() if row.is_plain), key=lambda way: rates[way])]
    timed_again = []
    for way in sorted(columns, key=lambda way: -rates[way]):
        ratio = speed_ratio(*columns[way], *base)
        timed_again.append(
            InTurns(*rows[way].key, way[1], rows[way].configuration, rates[way], ratio.mean, ratio.low, ratio.high)
        )
    return timed_again


def _read_own(recipe: Recipe, run: Run, backend: str, prompts: list[list[int]]) -> OwnDistributions:
    """Return the target's own distributions if its own backend is not measured, or was before an interruption."""
    with _load(recipe, replace(_settings(recipe, run, backend), draft=None), backend) as pair:
        return OwnDistributions(pair.target, prompts)


def _settings(recipe: Recipe, run: Run, backend: str) -> PairSettings:
    """Return the settings under which a backend decodes the run's target and trained draft."""
    counts, draft = recipe.speedup, str(run.path("draft"))
    measured: dict[str, Any] = {"speedup": counts, "sampler": recipe.sampler, "seed": recipe.seed}
    if backend in counts.files:
        target = Target(model=str(_file_of_target(recipe, run, backend)))
        draft = str(run.path("gguf", f"draft-{counts.files[backend]}.gguf"))
        return PairSettings(target, draft, gguf=recipe.gguf_pair(backend), **measured)
    target, pytorch = settled_decoding(recipe.target, draft, recipe.pytorch, recipe.device)
    return PairSettings(target, draft, recipe.device, pytorch=pytorch, **measured)


def _label(recipe: Recipe, pair: LoadedPair, backend: str) -> PairMeasured:
    """Name the run's pair, with PyTorch's settings that are not the defaults, or with the types of GGUF files."""
    title = "draft + target"
    if backend == "pytorch":
        title += pair.pytorch.suffix
    elif (file := target_gguf(recipe)) is not None:
        kind, type_of_file = recipe.speedup.files[backend], file_type(file)
        converted = ":" in backend and kind != type_of_file
        title += f", target {f'{kind} (from {type_of_file})' if converted else type_of_file}, draft {kind}"
    elif ":" in backend:
        title += f", {recipe.speedup.files[backend]}"
    return PairMeasured(title, backend)


def _file_of_target(recipe: Recipe, run: Run, backend: str) -> Path:
    """Return the target's GGUF file for a backend: its own, the exported one, or its own in another type."""
    kind, file = recipe.speedup.files[backend], target_gguf(recipe)
    exported = run.path("gguf", f"target-{kind}.gguf")
    if file is None:
        return exported
    if ":" not in backend:
        return file
    (path,) = files_in_types(str(file), [kind], lambda _: run.path("speedup", exported.name)).values()
    return path


def _load(recipe: Recipe, settings: PairSettings, backend: str) -> LoadedPair:
    if backend == "pytorch":
        return settings.load()
    pair = settings.load(recipe.corpus.block, min(settings.largest_tree, MOST_LEAVES))
    # All backends must end their texts alike. llama.cpp knows more end tokens by their names.
    ends = target_ends(recipe.target.model, load_tokenizer(recipe.target.model))
    return replace(pair, ends=ends.ids, text_ends=ends.texts)


# ── `distill speedup TARGET DRAFT`: any pair on the user's prompts, without a recipe's run ──


def measure_any_pair(
    settings: PairSettings,
    names: tuple[str, str | None],
    files: Sequence[str | Path],
    *,
    prompt_tokens: int,
    suite: Path | None = None,
    count: int | None = None,
    chat: Chat | None = None,
    table: Path | None = None,
    command: str = "",
) -> SpeedupReport:
    """Read prompts from files, or `count` questions of each category of a suite, load both models and measure them.

    `table` is a file of the target's n-grams, or a run that has one. `names` are target and draft as the user gave
    them. Plain text is cut into prompts of `prompt_tokens`. Raises RecipeError or DataError for prompts, contexts and
    configurations that do not fit together.
    """
    configurations, new_tokens = settings.configurations, settings.speedup.new_tokens
    other_vocabulary = any(configuration.other_vocabulary for configuration in configurations)
    own_draft = None if other_vocabulary else settings.draft
    # Calibrations and costs are measured on other prompts.
    needs_more = any(configuration.needs_calibration or configuration.needs_costs for configuration in configurations)
    more = settings.speedup.prompts if needs_more else 0
    room = _room_of(settings, own_draft)
    asked: SuitePrompts | None = None
    if suite is None:
        corpus = Corpus(sources=sources_of([Path(file) for file in files]))
        given_texts = settings.target.model, corpus, chat or Chat()
        prompts = read_user_prompts(*given_texts, settings.speedup.prompts, more, prompt_tokens, room)
    else:
        asked = suite_prompts(
            read_suite(suite), settings.target.model, chat or Chat(), count, settings.seed, room, new_tokens, more
        )
        prompts = UserPrompts(asked.asked, asked.others, {}, [])
        if need_calibration(configurations) and not asked.others:
            hint = "lower --count, or use calibration=none (for drafter table: another rule)"
            raise RecipeError("no question of the suite is left for calibrations", hint)
    longest = max(len(sample.prompt) for sample in (*prompts.measured, *prompts.others))
    longest = longest if asked is None else max(longest, asked.longest)
    counted = None if table is None else open_table(table, settings.target.model)
    longest_step = max(16, *(configuration.longest_round + 1 for configuration in configurations))
    tokens = max(longest + new_tokens, 2 * longest_step)
    with settings.load(tokens, settings.largest_tree, alone=other_vocabulary) as pair:
        units: list[int] = []
        if asked is not None:
            write = partial(write_texts, pair.target, new_tokens=new_tokens, rules=rules_of_pair(pair))
            turns, units = asked.all_turns(write, pair.text)
            prompts = replace(prompts, measured=turns, dropped=dict(asked.dropped))
        measured = [sample.prompt for sample in prompts.measured]
        spare = [sample.prompt for sample in prompts.others]
        reader = None
        if other_vocabulary and settings.draft is not None:
            reader = read_with(pair, settings.target, settings.draft, settings.device)
        calibration = None
        if need_calibration(configurations):
            calibration = calibrate_pair(pair, spare, settings, "prompts of the same files", counted)
        calibrations = {} if calibration is None else calibration.fits
        given = PairTexts(measured, spare or measured, calibrations, prompts.classes(), counted, units)
        title = "draft + target" + (f", {settings.at_once} texts at once" if settings.at_once > 1 else "")
        part = measure_pair(settings, pair, PairMeasured(title, pair.backend), given, reader)
        part = replace(part, pytorch=_settings_of(pair))
        report = SpeedupReport(
            command=command,
            machine=machine(),
            prompts=len(measured),
            new_tokens=new_tokens,
            sampler=Sampler.of(settings.sampler).describe(),
            parts=[replace(part, target=names[0], draft=names[1])],
            calibration="" if calibration is None else calibration.words,
            gguf=settings.gguf.described() if pair.backend != "pytorch" else "",
            pytorch=part.pytorch,
            target=names[0],
            draft=names[1],
            dropped=prompts.dropped,
            asked=prompts.asked,
            texts=", ".join(Path(file).name for file in files) if asked is None else asked.suite.name,
            table="" if table is None else str(table),
            suite="" if asked is None else asked.words,
        )
        return replace(report, verdict=verdict(report))


def _settings_of(pair: LoadedPair) -> str:
    """Return PyTorch's settings that are not the defaults, with the KL of a target that decodes in its file's bits."""
    settings = pair.pytorch.suffix.removeprefix(", ")
    if pair.pytorch.target_weights != "file" or pair.hugging_face is None:
        return settings
    return f"{settings} ({kl_of_bits(pair.reference, growing_decoder(pair.hugging_face[0])).words})"


def _room_of(settings: PairSettings, draft: str | None) -> int:
    """Return the most tokens of a prompt for which the contexts of target and draft leave room. Loads no weights."""
    return room_for_prompts(settings.target.model, draft, settings.speedup.new_tokens)
