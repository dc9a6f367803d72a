"""Stage `speedup`: plain and speculative decoding of the run's target and draft, by each backend. And of any pair."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distill.data.prompts import UserPrompts, read_user_prompts, sources_of
from distill.data.samples import read_prompts
from distill.data.suites import SuitePrompts, read_suite, suite_prompts
from distill.decoding.configured import check_configurations
from distill.decoding.ngrams import open_table
from distill.decoding.other_vocabulary import read_with
from distill.decoding.rules import rules_of_pair
from distill.engines.ends import target_ends
from distill.engines.llama_cpp.model import MOST_LEAVES
from distill.engines.loaded import LoadedPair, growing_decoder, room_for_prompts, settled_decoding
from distill.engines.torch.hugging_face import load_tokenizer
from distill.files import read_result, write_result, write_text
from distill.gguf.importing import file_type
from distill.gguf.writer import target_gguf
from distill.machine import machine
from distill.measuring.compare import PairSettings, PairTexts, TimedText, measure_pair, time_again, totals
from distill.measuring.evaluation import write_texts
from distill.measuring.identity import OwnDistributions, files_in_types, kl_of_bits
from distill.measuring.speedup_results import InTurns, PairMeasured, SpeedupPart, SpeedupReport, speedup_of
from distill.measuring.speedup_tables import speedup_blocks
from distill.measuring.verdict import explain, verdict
from distill.recipe import Chat, Corpus, Recipe, Target
from distill.run import Run
from distill.tables import document, shown, speed_ratio

# ── Stage `speedup`: plain against speculative decoding of the run's target and draft, by each backend ──


def speedup(recipe: Recipe, run: Run) -> list[Path]:
    """Write speedup.json and speedup.md. Each backend's part is kept if the run is interrupted."""
    settings = recipe.speedup
    for line in check_configurations(settings, recipe.sampler):
        run.say(f"  {line}")
    counted = any(configuration.counts_ngrams for configuration in settings.configurations)
    table = open_table(run.folder, recipe.target.model) if counted else None
    prompts = [one.prompt for one in read_prompts(run, "test")][: settings.prompts]
    given = PairTexts(prompts, table=table)
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
        sampler=recipe.sampler.describe(),
        parts=[parts[backend] for backend in settings.backends],
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
    room = _room_of(settings, own_draft)
    asked: SuitePrompts | None = None
    if suite is None:
        corpus = Corpus(sources=sources_of([Path(file) for file in files]))
        given_texts = settings.target.model, corpus, chat or Chat()
        prompts = read_user_prompts(*given_texts, settings.speedup.prompts, prompt_tokens, room)
    else:
        asked = suite_prompts(
            read_suite(suite), settings.target.model, chat or Chat(), count, settings.seed, room, new_tokens
        )
        prompts = UserPrompts(asked.asked, {}, [])
    longest = max(len(one.prompt) for one in prompts.measured)
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
        measured = [one.prompt for one in prompts.measured]
        reader = None
        if other_vocabulary and settings.draft is not None:
            reader = read_with(pair, settings.target, settings.draft, settings.device)
        given = PairTexts(measured, prompts.classes(), counted, units)
        title = "draft + target" + (f", {settings.at_once} texts at once" if settings.at_once > 1 else "")
        part = measure_pair(settings, pair, PairMeasured(title, pair.backend), given, reader)
        part = replace(part, pytorch=_settings_of(pair))
        report = SpeedupReport(
            command=command,
            machine=machine(),
            prompts=len(measured),
            new_tokens=new_tokens,
            sampler=settings.sampler.describe(),
            parts=[replace(part, target=names[0], draft=names[1])],
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
