"""The model card of a draft: the README.md in its folder, Markdown under YAML front matter."""

from __future__ import annotations

from typing import Any

import yaml

from distill.recipe.recipe import REASON
from distill.report.limits import limits
from distill.report.markup import HUB_NAME, code, table, words
from distill.report.text import (
    clean,
    interval,
    is_grown,
    machine_words,
    number,
    percent,
    significant,
    size,
    software_words,
    speedup_interval,
)
from distill.report.usage import how_to_use
from distill.results.evaluation_results import (
    CEILING,
    MEASURES,
    RATES,
    SAMPLED,
    SAMPLED_MEANS,
    SIDES,
    EvaluationReport,
)
from distill.results.export_results import ExportedFile, ExportReport
from distill.results.run_results import RunResults
from distill.results.speedup_results import Measurement, SpeedupReport
from distill.results.training_results import STORED, trained_tokens


def build_card(results: RunResults) -> str:
    """The whole card; a stage that has not run leaves one line that names it."""
    parts = [
        _front_matter(results),
        f"# {words(results.name)}",
        _purpose(results),
        "## How it was made",
        _making(results),
        "## Numbers",
        "### Acceptance and divergence",
        _acceptance(results.evaluation) if results.evaluation else _not_run("eval", results),
        "### Speedup",
        _speedup(results.speedup) if results.speedup else _not_run("speedup", results),
        "### GGUF files",
        _gguf(results.export) if results.export else _not_run("export", results),
        "## How to use it",
        how_to_use(results),
        "## Limits",
        "\n".join(f"- {words(sentence)}" for sentence in limits(results)),
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(results: RunResults) -> str:
    head: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "draft-model", "assisted-generation", "distill"],
    }
    donor = clean(results.donor.path) if results.donor else ""
    if HUB_NAME.fullmatch(donor):  # the hub refuses a base_model that is a path of this machine
        head["base_model"] = donor
    return f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---"


def _not_run(stage: str, results: RunResults) -> str:
    if stage in results.left_out:
        return f"The stage `{stage}` was not run: {results.left_out[stage]}."
    return f"The stage `{stage}` has not run."


def _pair(name: str, grown: set[str]) -> str:
    return words(name) + (" **(grown)**" if is_grown(name, grown) else "")


def _purpose(results: RunResults) -> str:
    target, draft = results.target, results.draft
    return (
        f"A draft model for speculative decoding with the target {code(target.path)}. The draft proposes several "
        "tokens at a time, the target verifies them in one step, and every accepted token saves the target a step of "
        f"its own. The draft has {number(draft.parameters)} parameters ({size(draft.bytes)}), the target "
        f"{number(target.parameters)} ({size(target.bytes)}). On its own the draft is a weak language model: use it "
        "only together with its target."
    )


def _making(results: RunResults) -> str:
    start = "Cut from the donor"
    if parent := results.parent:
        start = (
            f"Generation {number(parent.generation)}: started from the draft of {code(parent.run)} "
            f"(digest {code(parent.digest)})"
        )
    steps = results.steps
    trained = _not_run("train", results) + " These are the weights as cut from the donor."
    if steps:
        trained = (
            f"Trained for {number(len(steps))} steps on {number(trained_tokens(steps))} tokens; the loss went "
            f"from {significant(steps[0].loss)} to {significant(steps[-1].loss)}."
        )
    if results.training and results.training.best and results.training.best.measure == STORED:
        trained += f" Its weights were chosen by {words(results.training.best.words)}: {REASON}."
    if results.training and results.training.warning:
        trained += f" **{words(results.training.warning)}**"
    if results.training and results.training.curve:
        trained += f" {words(results.training.curve.sentence)}"
    machine, recipe = results.machine, results.config.get("name") or results.name
    place = f"{machine_words(machine)}, {machine.gpu or 'no GPU'}"
    return (
        f"{start} and trained to match the target with `distill`, recipe {code(recipe)}, finished "
        f"{words(results.date)}, on {words(place)}; {words(software_words(machine))}.\n\n"
        f"{trained}\n\n{_models(results)}"
    )


def _models(results: RunResults) -> str:
    models = {"target": results.target, "donor": results.donor, "draft": results.draft}
    rows = [
        [
            name,
            code(model.path),
            words(model.architecture),
            number(model.parameters),
            number(model.layers),
            number(model.hidden),
            number(model.mlp),
            number(model.vocabulary),
            number(model.bytes),
        ]
        for name, model in models.items()
        if model is not None
    ]
    heads = ["", "path", "architecture", "parameters", "layers", "hidden", "MLP", "vocabulary", "bytes"]
    return table(heads, rows, results.command)


def _acceptance(evaluation: EvaluationReport) -> str:
    parts = [
        "Before is the draft as cut, after is this draft; brackets hold intervals; sampler: "
        + words(evaluation.sampler_words)
        + "."
    ]
    if evaluation.stored is not None:
        parts.append("\n".join(f"- {words(sentence)}" for sentence in evaluation.stored.sentences))
    for domain, drafts in evaluation.domains.items():
        sides = [drafts.get(side) for side in SIDES]
        rows = [
            [label, *(interval(side.measure(name) if side else None, name in RATES) for side in sides)]
            for name, label in MEASURES.items()
            if name != CEILING
        ]
        counts = [f"{number(side and side.tokens)} ({number(side and side.prompts)})" for side in sides]
        rows.append(["tokens (prompts)", *counts])
        parts.append(f"**{words(domain)}**\n\n" + table(["", *SIDES], rows, evaluation.command))
    if evaluation.stored is not None:
        sampled = [interval(evaluation.stored.sampled.get(side), True) for side in SIDES]
        parts.append(f"{SAMPLED_MEANS}\n\n" + table(["", *SIDES], [[SAMPLED, *sampled]], evaluation.command))
    return "\n\n".join(parts)


def _speedup(report: SpeedupReport) -> str:
    heads = [
        "pair",
        "backend",
        "γ",
        "plain, tokens/s",
        "speculative, tokens/s",
        "acceptance",
        "tokens per round",
        "speedup",
        "",
        "identical / excused / different",
    ]
    found = (
        "End to end, compared with plain decoding of the same target. Each row is the fastest of the draft lengths "
        "tried:\n\n" + table(heads, [_fastest_row(report, one) for one in report.fastest], report.command)
    )
    others = [one for one in report.others if not one.is_plain]
    if not others:
        return found
    heads = ["pair", "backend", "configuration", "speedup", "", "tokens per round", "distribution"]
    rows = [
        [
            _pair(one.pair, report.grown_pairs),
            words(one.backend),
            words(one.configuration),
            speedup_interval(one),
            one.verdict,
            number(one.tokens_per_round),
            words(one.distribution),
        ]
        for one in others
    ]
    return (
        f"{found}\n\nOther configurations, each beside plain decoding under the same sampler, with the distribution "
        f"that the text follows:\n\n{table(heads, rows, report.command)}"
    )


def _fastest_row(report: SpeedupReport, one: Measurement) -> list[str]:
    plain = report.plain_beside(one)
    return [
        _pair(one.pair, report.grown_pairs),
        words(one.backend),
        str(one.length),
        number(plain.tokens_per_second if plain else None),
        number(one.tokens_per_second),
        percent(one.acceptance),
        number(one.tokens_per_round),
        speedup_interval(one),
        one.verdict,
        f"{number(one.identical)} / {number(one.excused)} / {number(one.different)}",
    ]


def _gguf(export: ExportReport) -> str:
    heads = [
        "file",
        "model",
        "type",
        "bytes",
        "positions",
        MEASURES["top1_agreement"],
        "mean \\|Δ log p\\|",
        "max \\|Δ log p\\|",
        "tokenizer mismatches",
    ]
    return "Each file in llama.cpp against its Hugging Face model:\n\n" + table(
        heads, [_file_row(file) for file in export.files], export.command
    )


def _file_row(file: ExportedFile) -> list[str]:
    parity = file.parity
    return [
        code(file.path),
        _pair(file.model, set()),
        words(file.outtype),
        number(file.bytes),
        number(parity and parity.positions),
        percent(parity and parity.top1_agreement),
        significant(parity and parity.mean_abs_dlogprob),
        significant(parity and parity.max_abs_dlogprob),
        f"{number(parity and len(parity.tokenizer_mismatches))} of {number(parity and parity.tokenizer_texts)}",
    ]
