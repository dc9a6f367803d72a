"""The sections of a run's report: the document that the page and the model card show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial

from distill.data.samples import REPEATED, QuestionTexts
from distill.engines.server_commands import (
    LLAMA_SERVER,
    VLLM,
    llama_server,
    served_name,
    serving,
    sglang,
    transformers,
    vllm,
)
from distill.files import is_gguf
from distill.measuring.evaluation_results import ByText, evaluation_blocks
from distill.measuring.speedup_tables import speedup_blocks
from distill.measuring.verdict import engine_of, leader, next_steps
from distill.recipe.configuration import USUAL_LENGTH
from distill.report import plots, tables
from distill.report.tables import RunResults
from distill.tables import Block, Code, Plot, Row, Table, clean, known, listed, number, placeless, size
from distill.training.saved import REMEDY, Evaluation, TrainingStep, TrainingSummary, trained_tokens

TEXTS = "Texts"  # This section has texts, which may be private.


def sections(results: RunResults) -> dict[str, list[Block]]:
    """Return the blocks of every section by its title. A stage that has not run has one line that says so."""
    evaluation, measured, export = results.evaluation, results.speedup, results.export
    by_title: dict[str, list[Block]] = {
        "In short": _short(results),
        "How to use it": usage(results),
        "Models": _models(results),
        TEXTS: _texts(results) if results.corpus else [],
        "From donor to draft": [tables.cuts(results)] if results.cuts else [],
        "Training": _training(results) if results.steps else [results.absence("train")],
        "Sparsity": [results.sparsity.sentence] if results.sparsity else [],
        "Acceptance probability and divergence": evaluation_blocks(evaluation)
        if evaluation
        else [results.absence("eval")],
        "Speedup": speedup_blocks(measured) if measured else [results.absence("speedup")],
        "GGUF files and parity": [tables.files(export)] if export else [results.absence("export")],
        "Limits": [limits(results)],
    }
    return {title: blocks for title, blocks in by_title.items() if blocks}


UNTIMED = (
    "No speed was measured, because `speedup.backends` is empty. `distill serve-check` measures the draft on a server."
)


def _short(results: RunResults) -> list[Block]:
    """Return the verdict of the measurement, the pictures, the commands, and a sentence on the draft."""
    measured, evaluation = results.speedup, results.evaluation
    warning = results.training.warning if results.training else None
    blocks: list[Block] = [f"{warning} What to do: {REMEDY}."] if warning else []
    why, commands, positions = list[Block](), list[Block](), dict[str, ByText]()
    if measured and measured.plain:
        part, again = leader(measured)[0], f"{next_steps(measured)}\n# measure it again\n{measured.command}"
        caption = "Dashed lines are plain decoding in the same engine. Thin lines are 95 % intervals by prompt."
        if measured.in_turns:
            caption += (
                " The engines were timed again in turns: these bars decide what is fastest. The engines below were "
                "timed one after the other, at times when the machine was faster or slower."
            )
        speeds = Plot(partial(plots.speeds, measured), caption)
        blocks += [measured.verdict, speeds]
        commands.append(Code(placeless(again), "sh"))
        why.append(Plot(partial(plots.time_of_rounds, part), f"Where a round's time goes, {engine_of(part)}."))
        positions = part.by_position
    if positions := evaluation.by_position if evaluation and evaluation.positions else positions:
        caption = (
            "Acceptance by drafted position in greedy rounds. Repeated text: tokens that end a sequence of "
            f"{REPEATED} tokens which occurred earlier."
        )
        why.insert(0, Plot(partial(plots.acceptance_by_position, positions), caption))
    missing = [results.absence(name) for name, result in (("speedup", measured), ("eval", evaluation)) if not result]
    if measured and not measured.parts:
        missing.append(UNTIMED)
    agreement = evaluation.agreement_words if evaluation else []
    return [*blocks, *why, *commands, *missing, *agreement, _draft(results)]


def _draft(results: RunResults) -> str:
    """Describe the draft in one sentence: its size, its donor and its target."""
    draft, donor, target = results.draft, results.donor, results.target
    sentence = f"A draft of {draft.parameters / 1e6:,.1f} million parameters"
    if donor is not None:
        same = donor.path == target.path
        kept = f"{draft.layers} of {donor.layers} layers" if draft.layers != donor.layers else "all layers"
        sentence += f", {kept} of {'the target' if same else donor.path},"
    return f"{sentence} for {target.path}."


def _models(results: RunResults) -> list[Block]:
    """Return the models with their sizes, the facts of the run that made the draft, and the resolved recipe."""
    machine = results.machine
    rows: list[Row] = [
        ["recipe", str(results.config.get("name") or results.name)],
        ["date", results.date],
        [
            "machine",
            f"{machine['cpu']}, {machine['cores']} cores, {size(machine['memory_bytes'])}, {machine['platform']}",
        ],
        ["GPU", str(machine["gpu"] or "none")],
        ["software", ", ".join(f"{name} {machine.get(name)}" for name in ("python", "torch", "transformers"))],
    ]
    if parent := results.parent:
        words = "{generation}, started from the draft of {run}, digest {digest}".format_map(parent)
        rows.append(["generation", words])
    config = json.dumps(results.config, indent=2, ensure_ascii=False, default=str)
    made = Table(["", "made by"], rows, results.command)
    return [tables.models(results), made, Code(config, "json", "Resolved recipe")]


def _texts(results: RunResults) -> list[Block]:
    """The texts that the draft learnt from and was measured on, and the texts that were left out."""
    corpus, answers = results.corpus, results.answers
    assert corpus is not None
    notes = [f"Left out of the corpus: {listed(corpus.dropped)}."] if corpus.dropped else []
    if answers is not None and answers.answers:
        cut = f"{number(answers.not_ended)} of {number(answers.answers)} answers were cut short by a limit."
        notes.append(f"Answers by {answers.writer or 'the target'}: {cut}")
        if answers.dropped:
            notes.append(f"Answers left out: {listed(answers.dropped)}.")
    return [*tables.texts(results), _questions(results.questions) if results.questions else [], notes]


def _questions(questions: QuestionTexts) -> list[str]:
    """Return a sentence for each source of questions that a model wrote: numbers, examples, and questions left out."""
    return [
        f"Questions by {questions.writer} ({source.file}): {number(source.asked)} texts written, "
        f"{number(source.usable)} usable, {number(source.kept)} of {number(source.wanted)} used"
        + (f"; left out: {listed(source.dropped)}" if source.dropped else "")
        + "".join(f"; “{text}”" for text in source.examples)
        for source in questions.sources
    ]


def training_plots(steps: Sequence[TrainingStep], evaluated: Sequence[Evaluation]) -> list[Block]:
    """Return the curves of a training."""
    block = plots.block_length(steps)
    each = "every step" if block == 1 else f"each point the mean of {block} steps"
    chosen_by = (
        "Expected acceptance on the target's stored validation answers, which are the same for all steps. Bars are "
        "95 % intervals over answers. Differences between steps are paired by answer, and their intervals are narrower."
    )
    return [
        Plot(partial(plots.training_curve, steps), f"Loss on training batches, {each}."),
        Plot(partial(plots.validation_curve, evaluated), chosen_by),
    ]


def _training(results: RunResults) -> list[Block]:
    """Return the curves of the training, its first and last step, and the weights that were taken."""
    steps, summary = results.steps, results.training
    return [*training_plots(steps, results.evaluated), _pace(steps), [] if summary is None else _outcome(summary)]


def _pace(steps: list[TrainingStep]) -> str:
    """Return a line on the length, speed and memory of the training."""
    rates = sorted(step.tokens_per_second for step in steps if known(step.tokens_per_second))
    memory = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    return (
        f"{number(len(steps))} steps, {number(trained_tokens(steps))} tokens, median "
        f"{number(rates[len(rates) // 2] if rates else None, 0)} tokens/s, peak memory "
        f"{size(max(memory, default=None))}; first step {steps[0].time}, last step {steps[-1].time}."
    )


def _outcome(training: TrainingSummary) -> list[str]:
    """The training in sentences, and the weights that were taken."""
    loss = " + ".join(f"{weight:g} {name}" for name, weight in training.loss.items())
    sentences = [f"{number(training.steps)} steps at a peak rate of {training.rate:g}; loss: {loss}."]
    sentences += [f"{training.words()}."] * known(training.epochs)
    if best := training.best:
        sentences.append(f"The weights of step {number(best.step)} were taken: {best.words}.")
    if training.warning:
        sentences.append(training.warning)
    return sentences


# ── How a draft is used: one command for each server or library ──

OTHER_ROWS = (
    "The heads have other numbers of rows, so vLLM is asked to draft among the tokens that both vocabularies have, "
    "which it does with the draft's best tokens alone. A transplant gives the draft the target's rows."
)
NO_FILE = "The run wrote no GGUF file of its draft: `distill export-gguf RUN` does."
PLACES = (
    "Paths of what the run made are relative to its folder; models of yours are named without their folders. "
    f"llama-server's options were run with {LLAMA_SERVER}, vLLM's "
    f"with its {VLLM} on a CPU; on several GPUs vLLM splits the draft as the target. SGLang's and ik_llama.cpp's were "
    "read, not run; Ollama takes no draft for GGUF files. Figures are of distill's own decoder on the run's machine: "
    "`distill serve-check RUN --server PATH` measures the pair on your server."
)


def usage(results: RunResults) -> list[Block]:
    """Return the commands that use the draft in llama.cpp and ik_llama.cpp.

    If the target is a folder, there are also transformers, vLLM and SGLang. Each command has the fixed draft length
    that was fastest in its engine, or else in another one.
    """
    target, draft, config = clean(served_name(results.target.path)), clean(results.draft.path), results.config
    same = results.target.vocabulary == results.draft.vocabulary
    measured, evaluation = results.speedup, results.evaluation
    rates = sorted(measured.fastest_of_backends.values() if measured else (), key=lambda row: row.tokens_per_second)
    timed = {row.backend.partition(":")[0]: row for row in rates}
    fallback = next(iter(timed.values()), None)
    chain, file = (timed.get(engine, fallback) for engine in ("pytorch", "gguf"))
    steps, length = ((row and row.length) or USUAL_LENGTH for row in (chain, file))
    kind = timed["gguf"].backend.partition(":")[2] if "gguf" in timed else ""
    big, small = (_file(results, model, kind) for model in ("target", "draft"))
    big = big or (target if is_gguf(target) else "target.gguf")
    sampling = {**config["sampler"], "repetition_penalty": config["answers"]["repetition_penalty"]}
    commands: dict[str, tuple[str, str]] = {}
    if not is_gguf(target):
        drawn = evaluation is not None and evaluation.acceptance_measure == "acceptance_sampling"
        served = vllm(target, draft, steps, probabilistic=drawn, same_vocabulary=same, sampling=sampling)
        commands["transformers"] = "python", transformers(target, draft, steps, same, sampling)
        commands["vLLM"] = "sh", served
        commands |= {"SGLang": ("sh", sglang(target, draft, steps))} if same else {}
    commands["llama.cpp"] = "sh", llama_server(big, small or "draft.gguf", length, sampling=sampling)
    commands["ik_llama.cpp"] = "sh", serving("ik", "draft", big, small or "draft.gguf", length)
    blocks: list[Block] = [block for name, (kind, text) in commands.items() for block in (f"{name}:", Code(text, kind))]
    untimed = "" if timed else "No draft length was timed; the one shown is only a starting point."
    return [*blocks, untimed, "" if small else NO_FILE, "" if same or is_gguf(target) else OTHER_ROWS, PLACES]


def _file(results: RunResults, model: str, kind: str) -> str:
    """Return the path of a model's GGUF file, of the timed type if there is one. Empty without a file."""
    files = [file for file in (results.export.files if results.export else []) if file.model == model]
    wanted = kind or results.config.get("speedup", {}).get("outtype")
    return clean(next((file.path for file in sorted(files, key=lambda file: file.outtype != wanted)), ""))


# ── The limits of a run's figures, in sentences for the report page and the model card ──


def limits(results: RunResults) -> list[str]:
    """Return the facts that a reader must know before quoting these figures, one sentence each."""
    machine = results.machine
    place = f"{machine['cpu']} ({machine['cores']} cores)" if machine["cpu"] else "one machine"
    sentences = [
        f"Every time and speedup was measured on {place}. Other hardware has other cost curves, so measure there "
        "before you rely on these figures."
    ]
    if results.speedup:
        sentences.append(
            "The best draft length of a pair was chosen on the runs that measured it. Its interval ignores the choice."
        )
        if different := sum(one.different or 0 for one in results.speedup.measurements if one.lossy is None):
            sentences.append(
                f"{different} outputs differ from the plain run without a rounding tie that would explain it: treat "
                "this pair as not shown to be lossless."
            )
    return sentences + [f"{fault}." for fault in (results.export.faults if results.export else ())]
