"""Checks before a run: preflight and rehearsal.

Preflight checks what a recipe needs (inputs, models, packages, disk) before the first stage. A rehearsal runs every
stage with the real models on 4 prompts and 3 steps, which finds failures within minutes.

Each check calls the code that would refuse later, loads no weights, and returns lines to print. It raises a
DistillError if the recipe needs more than there is. A rehearsal keeps every size that peak memory depends on (blocks,
training batches, text lengths) and shortens what repeats. Its figures predict the needs of the whole run."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib.util
import math
import shutil
import threading
import timeit
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from distill.data.corpus import check_chat, check_corpus, split_counts
from distill.data.packing import pack
from distill.data.samples import CorpusTexts
from distill.data.sources import Document
from distill.data.traffic import check_traffic, first_lines, pin_of
from distill.decoding.configured import check_configurations, check_trees
from distill.devices import pick_device, process_count, take_peaks
from distill.engines.loaded import context_of, growing_decoder
from distill.engines.pairs import compare_pair
from distill.engines.server_commands import other_sampling, shipped_heads
from distill.engines.torch.blocks import packed_logits
from distill.engines.torch.hugging_face import (
    DTYPES,
    UNDECODABLE,
    check_placement,
    check_weights,
    empty_model,
    load_config,
    local_snapshot,
    quiet,
    require_language_model,
    text_folder,
)
from distill.engines.torch.model import growing_cache, mask_refusal, state_refusal
from distill.engines.torch.static import require_static
from distill.errors import DataError, DistillError, RecipeError, RunError, faults_explained
from distill.files import is_gguf, parts_of, read_result, write_atomically, write_result, write_text
from distill.gguf.families import FAMILIES
from distill.gguf.fields import read_shape
from distill.gguf.library import describe_build, require_build, require_cache_types
from distill.gguf.tokenizer import read_tokenizer
from distill.machine import faster_type, install_extra
from distill.pipeline.running import forget_begun, run_pipeline
from distill.pipeline.stages import NAMES, find_stage, require_part
from distill.planning.hours import Rehearsed, StageEstimate, bounds, estimate_table, planned_hours, rehearsed_hours
from distill.progress import Caution, Progress, watched
from distill.recipe import Recipe, dump_recipe, is_path, parse_recipe
from distill.recipe.recipe import not_loadable, not_run
from distill.run import Run
from distill.surgery.cutter import check_cut, check_smaller, planned_layers
from distill.surgery.layers import layer_settings, set_layers
from distill.surgery.sparsity import MIN_RAMP_STEPS, RAMP
from distill.tables import document, size
from distill.teacher.answers import check_questions, check_writer
from distill.teacher.readers import check_teacher
from distill.teacher.store import planned_bytes
from distill.training.saved import MOST_EPOCHS, freshness
from distill.training.setup import check_training, require_processes, require_quantisation
from distill.vocabulary.vocabulary import Vocabulary

# ── Preflight ──


@dataclass
class Preflight:
    """The result of a preflight.

    `lines`: checks that passed. `skipped`: checks that were not made. `prompts`: the number of prompts that will be
    answered, or 0 if the models' configurations are not available.
    """

    lines: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    prompts: int = 0

    @property
    def warnings(self) -> list[str]:
        """Lines that the user should see even if everything passed."""
        return [line for line in self.lines if isinstance(line, Caution)]


def preflight(
    recipe: Recipe,
    inputs: bool = True,
    offline: bool = False,
    until: str | None = None,
    teacher: bool = True,
    folder: Path | None = None,
) -> Preflight:
    """Check a recipe before its first stage, for the stages up to `until` of the run in `folder`, if there is one.

    Without `inputs`, corpus sources, traffic file and writer of answers are not checked, because a run that has read
    them does not need them any more. Without `teacher`, the teacher's file or servers, and disk space for their output,
    are not checked. With `offline`, checks that need a model hub or a server are skipped and listed.
    """
    result = Preflight()
    prompts = recipe.answers.count(sum(source.questions or 0 for source in recipe.corpus.asked))
    check_models(recipe)
    if until is not None:
        require_part(recipe, [until])
    ahead = NAMES if until is None else NAMES[: NAMES.index(until) + 1]
    if inputs:
        result.lines, result.skipped, documents = check_corpus(recipe, offline)
        prompts = planned_prompts(recipe, documents)
        if not result.skipped and "train" in ahead:
            result.lines += check_epochs(recipe, documents, prompts)
        if "answers" in ahead or recipe.corpus.asked:
            lines, unasked = check_writer(recipe, offline)
            result.lines += lines
            result.skipped += unasked
    result.lines += check_device(recipe)
    if not recipe.target_runs_here:
        read = "only its tokenizer and config.json are read before `export`"
        result.lines.append(f"target: {recipe.target.model} runs elsewhere for answers and distributions, {read}")
    for stage, reason in not_run(recipe).items():
        result.lines.append(f"not run: {stage}, and no GGUF file of the target is written: {reason}")
    remote = [model for model in dict.fromkeys([recipe.target.model, recipe.donor_model]) if not is_path(model)]
    if remote and offline:
        result.skipped += [f"model {model}" for model in remote]
        result.skipped.append("pair rules, sizes and the cut, which need the models' configurations")
        return result
    if not inputs and folder is not None and (summary := folder / "corpus" / "summary.json").exists():
        prompts = read_result(summary, CorpusTexts).train.prompts
    result.prompts = prompts
    for check in (check_stages, check_pair, check_weights_of_models, check_static):
        result.lines += check(recipe)
    if inputs:
        result.lines += check_traffic(recipe) + check_questions(recipe) + check_chat(recipe, documents)
    if "export" in ahead:
        result.lines += check_export(recipe)
    result.lines += check_gguf(recipe)
    if teacher and "teacher" in ahead:
        result.lines += check_teacher(recipe, offline) + check_disk(recipe, prompts, folder)
    return result


def check_models(recipe: Recipe) -> None:
    """Raise DataError if the target or the donor is a path that does not exist."""
    for key, reference in (("target.model", recipe.target.model), ("cut.donor", recipe.donor_model)):
        base, adapter = parts_of(reference)
        for model in filter(None, (base, adapter)):
            if (is_path(model) or is_gguf(model)) and not Path(model).exists():
                hint = "correct the path, which is relative to the recipe's folder"
                raise DataError(f"{key}: {model} does not exist", hint)


def check_device(recipe: Recipe) -> list[str]:
    """Check that the device exists, holds the target as configured, and suits the processes of this command.

    Returns a warning for each dtype for which this processor has no instructions.
    """
    device = pick_device(recipe.device)
    drafts = device if recipe.pytorch.draft_device is None else pick_device(recipe.pytorch.draft_device)
    if recipe.pytorch.draft_weights in ("int8", "int4") and drafts.type != "cpu":
        what = f"pytorch.draft_weights {recipe.pytorch.draft_weights} needs the draft on a CPU, but it is on {drafts}"
        raise RecipeError(what, "leave draft_weights out, or set pytorch.draft_device: cpu")
    check_placement(recipe.target.quantise, device, recipe.target.shard)
    require_processes(recipe, device)
    if recipe.train.adapter is not None and recipe.train.adapter.base is not None:
        require_quantisation(device, recipe.train.adapter.base)
    lines = [f"device: {device}; the target in {recipe.target.dtype}, training in {recipe.train.dtype}"]
    for key, dtype in (("target.dtype", recipe.target.dtype), ("train.dtype", recipe.train.dtype)):
        faster = faster_type(dtype) if device.type == "cpu" else None
        if faster is not None:
            slow = f"this CPU has no instructions for {dtype} and computes it slowly"
            lines.append(Caution(f"warning: {slow}: {key}={faster} is faster"))
    return lines


def check_stages(recipe: Recipe) -> list[str]:
    """Check that cut, training and speedup are possible with these models, and that the draft is smaller.

    cut.allow_full_size allows a draft of the target's size.
    """
    target = load_config(recipe.target.model)
    lines = check_decoding(recipe.target.model, target) if not_loadable(recipe) is None else []
    lines += check_cut(recipe) + check_training(recipe)
    lines += map(Caution, check_configurations(recipe.speedup, recipe.sampler))  # They name what is lossy.
    check_trees(recipe, recipe.donor_model)
    donor = load_config(recipe.donor_model)
    if not recipe.cut.allow_full_size:
        check_smaller(recipe, target, donor)
    return lines


MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
MAX_TRIAL_WEIGHTS = 6 * 10**8  # weights of the shortened model that is tried


def check_decoding(reference: str, config: Any) -> list[str]:
    """Check that a target of a family that is not tested here can be read and decoded.

    The trial uses random weights, the target's widths except those of the MLPs, few tokens and experts, and the first
    layers up to the first of each kind. Raises DataError if a cache, or documents in one block, would give other logits
    than a whole text. Returns a line if the target must write its answers one at a time.
    """
    require_language_model(reference, config)
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None or (config.model_type in FAMILIES and state_refusal(kind, config) is None):
        return []
    if state_refusal(kind, config) is not None:
        growing_cache(config, reference)
    one_row_reason = state_refusal(kind, config) or mask_refusal(config)
    one_by_one = (
        f"{reference}: PyTorch writes answers one at a time ({one_row_reason}); a server writes several at once"
    )
    lines, few = [one_by_one] if one_row_reason else [], copy.deepcopy(config)
    untried = f"{reference}: decoding a {config.model_type} is tested when the weights are loaded"
    kinds = list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [""])
    kept = range(min(config.num_hidden_layers, 1 + max(kinds.index(layer) for layer in set(kinds))))
    fewest = max(8, 2 * (getattr(config, "num_experts_per_tok", None) or 0))
    most = dict.fromkeys(MLP_WIDTHS, 256) | dict.fromkeys(EXPERT_COUNTS, fewest)
    sizes = {name: getattr(config, name, None) for name in most}
    less = {name: most[name] for name, size in sizes.items() if isinstance(size, int) and size > most[name]}
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    large = {"initializer_range": 2 * config.hidden_size**-0.5}  # With the usual range, layers change almost nothing.
    try:
        set_layers(few, layer_settings(config, kept) | less | ends | large | {"vocab_size": 64})
        if sum(weight.numel() for weight in empty_model(few).parameters()) > MAX_TRIAL_WEIGHTS:
            return [*lines, untried]
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(few).eval()
    except Exception:  # A family may demand anything of its sizes.
        return [*lines, untried]
    with quiet():
        growing_decoder(model, prepack=False)
    blocks = pack([([1, 2, 3, 4], 1), ([5, 6, 7], 1)], 8, False)
    try:
        with torch.inference_mode():
            packed = packed_logits(model, blocks)[0, 4:7]
            alone = model(torch.tensor([[5, 6, 7]]), use_cache=False).logits[0]
            difference = (packed - alone).abs().max() / packed.std()
    except Exception as error:  # The model's code may not support such masks.
        raise DataError(f"{reference} cannot read several texts at once here ({error})", UNDECODABLE) from None
    if not float(difference) < 0.01:
        raise DataError(f"{reference} lets one text of a block see another", UNDECODABLE)
    return lines


def check_pair(recipe: Recipe) -> list[str]:
    """Check target and donor as a pair, and list the heads that the target ships.

    A transplanted draft has the target's vocabulary and rows, so only the context is compared.
    """
    Vocabulary.read(text_folder(recipe.target.model))  # Evaluation reads it too, hours later.
    pair = compare_pair(recipe.target.model, recipe.donor_model, same_rows=True)
    heads = shipped_heads(recipe.target.model)
    if (other := other_sampling(recipe.target.model, recipe.sampling)) is not None:
        heads.append(Caution(f"warning: {other}"))
    if recipe.cut.transplant is not None:
        return [f"context: {pair.context or 'fits'}", *heads]
    troubles = {line for line, fits, _ in pair.verdicts() if not fits}
    return [*(Caution(line) if line in troubles else line for line in pair.lines()), *heads]


def check_weights_of_models(recipe: Recipe) -> list[str]:
    """Check that the weights of donor and (if they are here) target hold the tensors that their config.json requires.

    Also check that a block of the corpus fits both contexts.
    """
    unloadable = not_loadable(recipe)
    if unloadable is not None and recipe.donor_model == recipe.target.model:
        raise RecipeError(f"cut.donor is the target itself: {unloadable}", "name another model as cut.donor")
    read = dict.fromkeys([*([recipe.target.model] if unloadable is None else []), recipe.donor_model])
    lines = [check_weights(model) for model in read]
    for role, model in (("target", recipe.target.model), ("donor", recipe.donor_model)):
        context = context_of(model)
        if context is not None and recipe.corpus.block > context:
            hint = f"lower corpus.block to {context}"
            what = f"corpus.block is {recipe.corpus.block}, but the {role}'s context is {context}"
            raise RecipeError(what, hint)
    return lines


def check_static(recipe: Recipe) -> list[str]:
    """Check that target and donor can decode with a static cache, if the recipe asks for one."""
    if recipe.pytorch.static and "pytorch" in recipe.speedup.backends:
        for reference in dict.fromkeys([recipe.target.model, recipe.donor_model]):
            require_static(empty_model(load_config(reference)), reference)
    return []


def planned_prompts(recipe: Recipe, documents: list[Document]) -> int:
    """Estimate how many train prompts will be answered.

    A conversation or question gives one prompt. Other text gives one per stretch as long as a prompt with its answer.
    """
    learnt = [document for document in documents if document.split == "train"]
    stretch = 4 * (recipe.answers.prompt_tokens + recipe.answers.new_tokens)  # characters
    texts = sum(1 if document.messages is not None else 1 + len(document.text) // stretch for document in learnt)
    count = round(split_counts(recipe, documents)["train"])
    return min(recipe.answers.count(count), count - len(learnt) + texts)


def check_epochs(recipe: Recipe, documents: list[Document], prompts: int) -> list[str]:
    """Estimate how often training sees its text if each answer has the maximum length."""
    learnt = [document for document in documents if document.split == "train"]
    answers, each = recipe.answers, recipe.answers.prompt_tokens + recipe.answers.new_tokens
    characters = sum(len(document.plain_text) for document in learnt if document.has_answer)
    given = min(recipe.corpus.tokens, characters)
    served = 0 if answers.traffic is None else pin_of(Path(answers.traffic))["lines"]
    positions = given + prompts * each + served * recipe.corpus.block
    epochs = recipe.train.steps * recipe.train.batch * recipe.corpus.block / max(1, positions)
    of = f"{prompts} prompts" + (f", {served} served lines" if served else "") + (" and given text" if given else "")
    line = f"epochs: about {epochs:.1f} over the answers to {of}"
    line += freshness(epochs, recipe.train.patience)
    return [Caution(f"warning: {line}")] if epochs > MOST_EPOCHS and recipe.train.patience is None else [line]


BYTES_OF_PROCESS, BYTES_PER_PROMPT = 0.55e9, 3400  # measured by scripts/benchmarks/scale.py


def check_disk(recipe: Recipe, prompts: int, folder: Path | None = None) -> list[str]:
    """Check that the teacher's distributions fit on the disk of `folder` (a run that may hold some), or of this one."""
    store = sum(planned_bytes(recipe, prompts).values())
    place, stored = Path.cwd(), 0
    if folder is not None:
        place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
        files = (*folder.glob("teacher/**/*"), *folder.glob("answers/**/*.safetensors"))
        stored = sum(file.stat().st_size for file in files if file.is_file())
    free = shutil.disk_usage(place).free
    if store - stored > free:
        raise RunError(
            f"the teacher store needs {size(store - stored)} more in {place}, but only {size(free)} are free",
            "lower corpus.tokens, answers.prompts or teacher.top_k",
        )
    memory = BYTES_OF_PROCESS + prompts * BYTES_PER_PROMPT
    return [
        f"disk: the teacher store needs at most {store / 1e6:.0f} MB, {free / 1e9:.0f} GB are free here; memory: "
        f"{memory / 1e9:.1f} GB in addition to the models"
    ]


def check_export(recipe: Recipe) -> list[str]:
    """If the recipe asks for GGUF files, check that target and draft can be written and llama.cpp can read them."""
    load = not_loadable(recipe) is None
    if not recipe.export.outtypes and not (load and recipe.speedup.files):
        return []
    without = "train without GGUF files: export.outtypes=[] speedup.backends=[pytorch]"
    fork = any(backend.startswith("ik") for backend in recipe.speedup.files)
    for package, extra in (("llama-cpp-python", "llama"), *([("ik-llama-cpp-python", "ik")] if fork else [])):
        if importlib.util.find_spec(package.removesuffix("-python").replace("-", "_")) is None:
            what = f"export.outtypes and speedup.backends ask for GGUF files, but {package} is not installed"
            raise RecipeError(what, f"{install_extra(extra)}; or {without}")
    lines = []
    for model in dict.fromkeys([recipe.target.model, recipe.donor_model]):
        written = load or model != recipe.target.model  # The draft always has the target's tokenizer.
        folder = local_snapshot(model) if written else text_folder(model)
        if folder is None:
            lines.append(f"export of {model}: not checked, because its files are not on this machine yet")
            continue
        try:
            rows = read_shape(folder).vocabulary if written else load_config(model).get_text_config().vocab_size
            if model == recipe.target.model:  # The draft gets this tokenizer.
                read_tokenizer(folder, rows)
            if model == recipe.donor_model and recipe.export.outtypes:
                read_shape(folder, planned_layers(recipe))
        except DistillError as error:
            raise type(error)(f"export: {error.what}", f"{error.hint}; or {without}") from error
    return lines


def check_gguf(recipe: Recipe) -> list[str]:
    """Check that the build of llama.cpp can do what section gguf asks, if a GGUF file is opened. Describe the build."""
    writer = recipe.answers.writer
    timed = recipe.speedup.files if not_loadable(recipe) is None else {}
    target = timed or recipe.teacher.gguf is not None or (writer is not None and writer.gguf is not None)
    opened = {"target": target, "draft": timed}
    given = [role for role in ("draft", "target") if getattr(recipe.gguf, role).given()]
    for role in given:
        if not opened[role]:
            hint = "leave them out, or measure GGUF files: speedup.backends=[gguf]"
            what = f"gguf.{role} has options, but this recipe opens no GGUF file of the {role}"
            raise RecipeError(what, hint)
    if not target or importlib.util.find_spec("llama_cpp") is None:
        return []  # Stages that need the library raise the error.
    for role, model in (("target", recipe.target.model), ("draft", recipe.donor_model)):
        options = recipe.gguf_options("target" if role == "target" else "draft")
        require_build(options, f"gguf.{role}")
        config = load_config(model).get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        require_cache_types(options, size, size, f"gguf.{role}")
    lines = [describe_build()]
    return [*lines, f"llama.cpp's options: {recipe.gguf.described()}"] if given else lines


# ── A rehearsal ──


@dataclass(frozen=True)
class Rehearsal:
    """rehearsal.json. `config` is the shortened recipe. `expected` has one entry for each of `stages`."""

    recipe: str
    config: str
    stages: list[Rehearsed]
    expected: list[StageEstimate]


PROMPTS, STEPS, LINES = 4, 3, 32
QUESTIONS, HELD_OUT_SHARE = 48, 0.25  # minimum self-asked questions, and the share of them in validation and in test
RESULT = "rehearsal.json"
INTERVAL = 0.02  # seconds between samples of memory. Loading a model, or a batch, takes longer.
SUFFIX = "-rehearsal"


def _with(section: Any, values: dict[str, Any]) -> Any:
    """Return a section with these values at dotted keys. Keys of a section that is off are ignored."""
    if section is None:
        return None
    changed: dict[str, Any] = {}
    for key, value in values.items():
        name, dot, rest = key.partition(".")
        changed[name] = _with(changed.get(name, getattr(section, name)), {rest: value}) if dot else value
    return section.model_copy(update=changed)


def shortened(recipe: Recipe, runs: Path) -> Recipe:
    """The recipe of a rehearsal in the folder `runs`; RecipeError if a shortened value is not a valid one."""
    name = recipe.name[: 100 - len(SUFFIX)] + SUFFIX
    train, speedup, processes = recipe.train, recipe.speedup, process_count()
    steps = STEPS
    if train.sparsity is not None:  # Sparsity needs a minimum number of steps to remove anything.
        steps = max(STEPS, math.ceil(MIN_RAMP_STEPS / RAMP))
    values: dict[str, Any] = {
        "name": name,
        "corpus": _shortened_corpus(recipe),
        "answers.prompts": min(PROMPTS, recipe.answers.count(PROMPTS)),
        "cut.score_blocks": min(2, recipe.cut.score_blocks),
        "train.steps": steps,
        "train.save_every": steps,
        "train.acceptance.every": steps,
        "train.acceptance.prompts": PROMPTS,
        "train.acceptance.patience": None,
        "eval.prompts": PROMPTS,
        "eval.file_blocks": min(PROMPTS, recipe.eval.file_blocks),
        "speedup.prompts": 2,
        "speedup.lengths": tuple(sorted(speedup.lengths)[-1:]),
    }
    if recipe.answers.traffic is not None:
        values["answers.traffic"] = str((runs / name / "traffic.jsonl").resolve())
    if processes > 1:  # Each process needs a group of prompts and a shard of distributions.
        values["answers.group"] = min(recipe.answers.group, max(1, PROMPTS // processes))
        values["teacher.shard_blocks"] = 1
    return parse_recipe(_with(recipe, values).model_dump(mode="json"), f"the rehearsal of {recipe.name}")


def _shortened_corpus(recipe: Recipe) -> Any:
    """Reduce tokens and self-asked questions. A larger share of these is held out, so that no split is empty."""
    corpus = recipe.corpus
    values: dict[str, Any] = {"tokens": min(corpus.tokens, recipe.teacher.batch * corpus.block)}
    if corpus.asked:
        values["sources"] = tuple(
            source if source.questions is None else _with(source, {"questions": min(QUESTIONS, source.questions)})
            for source in corpus.sources
        )
        values |= {name: max(HELD_OUT_SHARE, getattr(corpus, name)) for name in ("validation", "test")}
    return _with(corpus, values)


def rehearse(recipe: Recipe, short: Recipe, run: Run, until: str | None = None) -> str:
    """Run the stages of `short` in `run`, up to `until`. Return a Markdown table of what `recipe` needs.

    A rehearsal continues where the last one ended or was killed. A rehearsal of another recipe is replaced. Raises
    RunError if the folder is a run that is not a rehearsal.
    """
    path, config = run.path(RESULT), dump_recipe(short)
    if run.folder.exists() and not path.exists() and any(run.folder.iterdir()):
        raise RunError(f"{run.folder} is a run, not a rehearsal", "rename it, or give the recipe another name")
    done: list[Rehearsed] = []
    if path.exists():
        before = read_result(path, Rehearsal)
        if before.config == config:
            done = before.stages
        else:
            with run.locked(), faults_explained(run.folder):
                shutil.rmtree(run.folder)
    finished = {entry.stage for entry in done}
    run.open(config)
    forget_begun(run)  # The rest of a begun stage would otherwise count as the whole stage.
    write_result(path, Rehearsal(recipe.name, config, done, []))
    traffic, short_traffic = recipe.answers.traffic, short.answers.traffic
    if traffic is not None and short_traffic is not None and not Path(short_traffic).exists():
        lines = first_lines(Path(traffic), LINES)
        write_atomically(Path(short_traffic), lambda place: place.write_bytes(lines))
    with MemoryWatch() as memory, watched() as loops:

        def record(stage: str) -> None:
            if stage not in finished:
                done.append(_measured(run, stage, loops, memory.take()))
                write_result(path, Rehearsal(recipe.name, config, done, rehearsed_hours(recipe, short, run, done)))
            loops.clear()

        run_pipeline(short, run, until, show=record)
    expected = rehearsed_hours(recipe, short, run, done)
    write_result(path, Rehearsal(recipe.name, config, done, expected))
    table = document([estimate_table(expected, done), verdicts(expected, run.folder)])
    write_text(run.path("rehearsal.md"), table)
    return table


def expected_stages(recipe: Recipe, folder: Path, prompts: int = 0) -> tuple[list[StageEstimate], str]:
    """Return the expected needs of each stage, and their source.

    The source is a rehearsal of the recipe in `folder`'s parent. Without one, on a CPU, it is counts and sizes, with
    `prompts` to answer. Otherwise the list is empty.
    """
    short = shortened(recipe, folder.parent)
    with contextlib.suppress(DataError):
        rehearsal = read_result(folder.parent / short.name / RESULT, Rehearsal)
        if rehearsal.config == dump_recipe(short):
            return rehearsal.expected, "by the rehearsal"
    if not prompts or pick_device(recipe.device).type != "cpu":
        return [], ""
    return planned_hours(recipe, prompts, products_per_second(recipe.target.dtype)), "by counts and sizes"


def expected_lines(expected: Sequence[StageEstimate], source: str) -> list[str]:
    """Return a line with time, memory and disk for each of `expected_stages`."""
    return [
        f"{stage.stage}: {bounds(stage.low, stage.high)}, "
        f"{size(stage.device_bytes or stage.memory_bytes)} of memory, {size(stage.disk_bytes)} on disk, {source}"
        for stage in expected
    ]


@functools.cache  # A sweep asks for every run.
def products_per_second(dtype: str) -> float:
    """Return operations per second (multiplications and additions) of this CPU in large matrices: the best of 12."""
    matrix = torch.ones(1024, 1024, dtype=DTYPES[dtype])
    return 2 * 1024**3 / min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=12))


def verdicts(expected: Sequence[StageEstimate], place: Path) -> list[str]:
    """Return a line each on disk and memory: whether this machine has what the whole run is expected to need."""
    import psutil

    disk, free = sum(stage.disk_bytes for stage in expected), shutil.disk_usage(place).free
    memory, total = max(stage.memory_bytes for stage in expected), psutil.virtual_memory().total
    lines = []
    for what, needed, available in (("disk", disk, free), ("memory", memory, total)):
        fits = "fits" if needed <= available else "warning: does not fit"
        where = "free here" if what == "disk" else "in this machine"
        lines.append(f"{what}: {fits}, {size(needed)} expected, {size(available)} {where}")
    return lines


def _measured(run: Run, name: str, loops: list[Progress], memory: tuple[int, int]) -> Rehearsed:
    record = run.done(name) or {}
    disk = 0
    for place in find_stage(name).writes:
        path = run.path(place)
        disk += sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    return Rehearsed(name, record.get("seconds", 0.0), sum(loop.seconds for loop in loops), *memory, disk)


class MemoryWatch:
    """Peak memory of this process, sampled by a thread within a `with` block. torch counts that of accelerators."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._peak = 0
        self._lock = threading.Lock()  # A sample from before `take` must not be recorded after it.
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        self.take()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(INTERVAL):
            with self._lock:
                self._peak = max(self._peak, self._process.memory_info().rss)

    def take(self) -> tuple[int, int]:
        """Return peak bytes of the process and of all accelerators since the last call, and free unused memory."""
        with self._lock:
            peaks = max(self._peak, self._process.memory_info().rss), take_peaks()
            gc.collect()
            self._peak = 0
        return peaks
