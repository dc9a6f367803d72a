"""Before a run. Preflight: what a recipe asks of its inputs, models, packages and disk, checked before the first stage.
Rehearsal: every stage with the real models on 4 prompts and 3 steps, which finds failures within minutes.

Each check asks the very code that would refuse later, loads no weights, and returns lines to print. It raises a
DistillError where the recipe asks for more than there is. A rehearsal keeps every size that peak memory depends on
(blocks, batches of training, lengths of texts) and shortens what repeats. From its figures follows what the whole run
will take."""

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
from distill.surgery.sparsity import MIN_RAMP_STEPS
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
    """Lines about the checks that passed, and the names of the checks that were not made; how many prompts are
    to be answered, 0 where the models' configurations are not here."""

    lines: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    prompts: int = 0

    @property
    def warnings(self) -> list[str]:
        """Those lines that a user should see even when everything passed."""
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

    Without `inputs`, the corpus sources, the traffic file and the writer of answers are left out: a run that has read
    them does not need them any more; without `teacher`, the teacher's file or servers and room for what they give are.
    With `offline`, checks that need a model hub or a server are skipped and listed.
    """
    found = Preflight()
    prompts = recipe.answers.count(sum(source.questions or 0 for source in recipe.corpus.asked))
    check_models(recipe)
    if until is not None:
        require_part(recipe, [until])
    ahead = NAMES if until is None else NAMES[: NAMES.index(until) + 1]
    if inputs:
        found.lines, found.skipped, documents = check_corpus(recipe, offline)
        prompts = planned_prompts(recipe, documents)
        if not found.skipped and "train" in ahead:
            found.lines += check_epochs(recipe, documents, prompts)
        if "answers" in ahead or recipe.corpus.asked:
            lines, unasked = check_writer(recipe, offline)
            found.lines += lines
            found.skipped += unasked
    found.lines += check_device(recipe)
    if not recipe.target_runs_here:
        read = "only the tokenizer and config.json are read before `export`"
        found.lines.append(f"target: {recipe.target.model} runs elsewhere for answers and distributions, {read}")
    for stage, reason in not_run(recipe).items():
        found.lines.append(f"not run: {stage}, and no GGUF file of the target is written: {reason}")
    remote = [model for model in dict.fromkeys([recipe.target.model, recipe.donor_model]) if not is_path(model)]
    if remote and offline:
        found.skipped += [f"model {model}" for model in remote]
        found.skipped.append("pair rules, sizes and the cut, which need those models' configurations")
        return found
    if not inputs and folder is not None and (summary := folder / "corpus" / "summary.json").exists():
        prompts = read_result(summary, CorpusTexts).train.prompts
    found.prompts = prompts
    for check in (check_stages, check_pair, check_weights_of_models, check_static):
        found.lines += check(recipe)
    if inputs:
        found.lines += check_traffic(recipe) + check_questions(recipe) + check_chat(recipe, documents)
    if "export" in ahead:
        found.lines += check_export(recipe)
    found.lines += check_gguf(recipe)
    if teacher and "teacher" in ahead:
        found.lines += check_teacher(recipe, offline) + check_disk(recipe, prompts, folder)
    return found


def check_models(recipe: Recipe) -> None:
    """Target and donor are there, where the recipe names them by a path."""
    for key, reference in (("target.model", recipe.target.model), ("cut.donor", recipe.donor_model)):
        base, adapter = parts_of(reference)
        for model in filter(None, (base, adapter)):
            if (is_path(model) or is_gguf(model)) and not Path(model).exists():
                hint = "correct the path, which starts at the recipe's folder"
                raise DataError(f"{key}: {model} does not exist", hint)


def check_device(recipe: Recipe) -> list[str]:
    """The device exists, holds the target as configured, and suits the processes of this command; a warning for each
    type that this processor has no instructions for."""
    device = pick_device(recipe.device)
    drafts = device if recipe.pytorch.draft_device is None else pick_device(recipe.pytorch.draft_device)
    if recipe.pytorch.draft_weights in ("int8", "int4") and drafts.type != "cpu":
        what = f"pytorch.draft_weights {recipe.pytorch.draft_weights} is for a draft on a CPU, this one is on {drafts}"
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
    """The settings of cut, training and speedup are possible with these models; the draft costs less than its target or
    is allowed to cost as much."""
    target = load_config(recipe.target.model)
    lines = check_decoding(recipe.target.model, target) if not_loadable(recipe) is None else []
    lines += check_cut(recipe) + check_training(recipe)
    lines += map(Caution, check_configurations(recipe.speedup, recipe.sampler))  # what it names is lossy
    check_trees(recipe, recipe.donor_model)
    donor = load_config(recipe.donor_model)
    if not recipe.cut.allow_full_size:
        check_smaller(recipe, target, donor)
    return lines


MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp")
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
MOST_TRIED = 6 * 10**8  # numbers of the few layers that are tried


def check_decoding(reference: str, config: Any) -> list[str]:
    """A target of a family that is not tested here can be read and decoded: tried with random weights, in its own
    widths but for the MLPs, of few tokens and experts, and of its first layers alone, each kind among them.

    DataError where a cache, or documents in one block, would give other logits than a whole text; a line where its
    answers are written one by one.
    """
    require_language_model(reference, config)
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    if kind is None or (config.model_type in FAMILIES and state_refusal(kind, config) is None):
        return []
    if state_refusal(kind, config) is not None:
        growing_cache(config, reference)
    alone = state_refusal(kind, config) or mask_refusal(config)
    lines = [f"{reference}: the model itself writes answers one by one ({alone}); a server writes several at once"]
    lines, few = lines if alone else [], copy.deepcopy(config)
    untried = f"{reference}: whether a {config.model_type} can be decoded is tried when its weights are loaded"
    kinds = list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [""])
    kept = range(min(config.num_hidden_layers, 1 + max(kinds.index(one) for one in set(kinds))))
    fewest = max(8, 2 * (getattr(config, "num_experts_per_tok", None) or 0))
    most = dict.fromkeys(MLP_WIDTHS, 256) | dict.fromkeys(EXPERT_COUNTS, fewest)
    less = {
        name: size for name, size in most.items() if isinstance(own := getattr(config, name, None), int) and own > size
    }
    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    large = {"initializer_range": 2 * config.hidden_size**-0.5}  # in the usual ones, layers change next to nothing
    try:
        set_layers(few, layer_settings(config, kept) | less | ends | large | {"vocab_size": 64})
        if sum(weight.numel() for weight in empty_model(few).parameters()) > MOST_TRIED:
            return [*lines, untried]
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(few).eval()
    except Exception:  # whatever a family demands of its sizes
        return [*lines, untried]
    with quiet():
        growing_decoder(model, prepack=False)
    blocks = pack([([1, 2, 3, 4], 1), ([5, 6, 7], 1)], 8, False)
    try:
        with torch.inference_mode():
            found = packed_logits(model, blocks)[0, 4:7]
            apart = (found - model(torch.tensor([[5, 6, 7]]), use_cache=False).logits[0]).abs().max() / found.std()
    except Exception as error:  # from code that was not written for such masks
        raise DataError(f"{reference} cannot read several texts at once here ({error})", UNDECODABLE) from None
    if not float(apart) < 0.01:
        raise DataError(f"{reference} lets one text of a block see another", UNDECODABLE)
    return lines


def check_pair(recipe: Recipe) -> list[str]:
    """Target and donor as a pair, and the heads that the target ships in a draft's place.

    A transplanted draft has the target's own vocabulary and rows: only the context remains to be compared.
    """
    Vocabulary.read(text_folder(recipe.target.model))  # as evaluation does, after hours
    pair = compare_pair(recipe.target.model, recipe.donor_model, same_rows=True)
    heads = shipped_heads(recipe.target.model)
    if (other := other_sampling(recipe.target.model, recipe.sampling)) is not None:
        heads.append(Caution(f"warning: {other}"))
    if recipe.cut.transplant is not None:
        return [f"context: {pair.context or 'fits'}", *heads]
    troubles = {line for line, fits, _ in pair.verdicts() if not fits}
    return [*(Caution(line) if line in troubles else line for line in pair.lines()), *heads]


def check_weights_of_models(recipe: Recipe) -> list[str]:
    """The weights of target and donor hold the tensors that their config.json asks for, the target's if they are here.
    A block of the corpus fits the contexts of both."""
    unloadable = not_loadable(recipe)
    if unloadable is not None and recipe.donor_model == recipe.target.model:
        raise RecipeError(f"cut.donor is the target itself: {unloadable}", "name another model as cut.donor")
    read = dict.fromkeys([*([recipe.target.model] if unloadable is None else []), recipe.donor_model])
    lines = [check_weights(model) for model in read]
    for role, model in (("target", recipe.target.model), ("donor", recipe.donor_model)):
        context = context_of(model)
        if context is not None and recipe.corpus.block > context:
            hint = f"lower corpus.block to {context}"
            raise RecipeError(f"corpus.block is {recipe.corpus.block}, the {role}'s context {context}", hint)
    return lines


def check_static(recipe: Recipe) -> list[str]:
    """Target and donor can decode with a static cache where the recipe asks for one."""
    if recipe.pytorch.static and "pytorch" in recipe.speedup.backends:
        for reference in dict.fromkeys([recipe.target.model, recipe.donor_model]):
            require_static(empty_model(load_config(reference)), reference)
    return []


def planned_prompts(recipe: Recipe, documents: list[Document]) -> int:
    """About how many train prompts are answered: a conversation or question gives one, other text one from each stretch
    as long as a prompt and its answer."""
    own = [one for one in documents if one.split == "train"]
    each = 4 * (recipe.answers.prompt_tokens + recipe.answers.new_tokens)  # in characters
    texts = sum(1 if one.messages is not None else 1 + len(one.text) // each for one in own)
    count = round(split_counts(recipe, documents)["train"])
    return min(recipe.answers.count(count), count - len(own) + texts)


def check_epochs(recipe: Recipe, documents: list[Document], prompts: int) -> list[str]:
    """About how often training sees its text, where each answer is as long as it may be."""
    own = [one for one in documents if one.split == "train"]
    answers, each = recipe.answers, recipe.answers.prompt_tokens + recipe.answers.new_tokens
    given = min(recipe.corpus.tokens, sum(len(one.plain_text) for one in own if one.has_answer))
    served = 0 if answers.traffic is None else pin_of(Path(answers.traffic))["lines"]
    positions = given + prompts * each + served * recipe.corpus.block
    epochs = recipe.train.steps * recipe.train.batch * recipe.corpus.block / max(1, positions)
    of = f"{prompts} prompts" + (f", {served} served lines" if served else "") + (" and given text" if given else "")
    line = f"epochs: about {epochs:.1f} over the answers to {of}"
    line += freshness(epochs)
    return [Caution(f"warning: {line}")] if epochs > MOST_EPOCHS else [line]


BYTES_OF_PROCESS, BYTES_PER_PROMPT = 0.55e9, 3400  # as scripts/benchmarks/scale.py measures them


def check_disk(recipe: Recipe, prompts: int, folder: Path | None = None) -> list[str]:
    """The teacher's distributions fit the disk of the run in `folder`, of which it may hold some, or of this folder."""
    store = sum(planned_bytes(recipe, prompts).values())
    place, stored = Path.cwd(), 0
    if folder is not None:
        place = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
        files = (*folder.glob("teacher/**/*"), *folder.glob("answers/**/*.safetensors"))
        stored = sum(file.stat().st_size for file in files if file.is_file())
    free = shutil.disk_usage(place).free
    if store - stored > free:
        raise RunError(
            f"the teacher store does not fit the disk: it needs {size(store - stored)} more in {place}, where "
            f"{size(free)} are free",
            "lower corpus.tokens, answers.prompts or teacher.top_k",
        )
    memory = BYTES_OF_PROCESS + prompts * BYTES_PER_PROMPT
    return [
        f"disk: the teacher store needs at most {store / 1e6:.0f} MB, {free / 1e9:.0f} GB are free here; memory: "
        f"{memory / 1e9:.1f} GB beside the models"
    ]


def check_export(recipe: Recipe) -> list[str]:
    """Target and draft can be written as GGUF, and llama.cpp is here to read them, where the recipe asks for files."""
    load = not_loadable(recipe) is None
    if not recipe.export.outtypes and not (load and recipe.speedup.files):
        return []
    without = "train without GGUF files: export.outtypes=[] speedup.backends=[pytorch]"
    fork = any(backend.startswith("ik") for backend in recipe.speedup.files)
    for package, extra in (("llama-cpp-python", "llama"), *([("ik-llama-cpp-python", "ik")] if fork else [])):
        if importlib.util.find_spec(package.removesuffix("-python").replace("-", "_")) is None:
            what = f"export.outtypes and speedup.backends ask for GGUF files, and {package} is not installed"
            raise RecipeError(what, f"{install_extra(extra)}; or {without}")
    lines = []
    for model in dict.fromkeys([recipe.target.model, recipe.donor_model]):
        written = load or model != recipe.target.model  # the draft has the target's tokenizer in any case
        folder = local_snapshot(model) if written else text_folder(model)
        if folder is None:
            lines.append(f"export of {model}: not checked, its files are not on this machine yet")
            continue
        try:
            rows = read_shape(folder).vocabulary if written else load_config(model).get_text_config().vocab_size
            if model == recipe.target.model:  # whose tokenizer the draft has
                read_tokenizer(folder, rows)
            if model == recipe.donor_model and recipe.export.outtypes:
                read_shape(folder, planned_layers(recipe))
        except DistillError as error:
            raise type(error)(f"export: {error.what}", f"{error.hint}; or {without}") from error
    return lines


def check_gguf(recipe: Recipe) -> list[str]:
    """The build of llama.cpp, and that it can do what section gguf asks; nothing where no GGUF file is opened."""
    writer = recipe.answers.writer
    timed = recipe.speedup.files if not_loadable(recipe) is None else {}
    target = timed or recipe.teacher.gguf is not None or (writer is not None and writer.gguf is not None)
    opened = {"target": target, "draft": timed}
    given = [role for role in ("draft", "target") if getattr(recipe.gguf, role).given()]
    for role in given:
        if not opened[role]:
            hint = "leave them out, or measure GGUF files: speedup.backends=[gguf]"
            raise RecipeError(f"gguf.{role} has options, and this recipe opens no GGUF file of the {role}", hint)
    if not target or importlib.util.find_spec("llama_cpp") is None:
        return []  # stages that need the library say so
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
    """rehearsal.json. `config` is the shortened recipe; `expected` holds one entry for each of `stages`."""

    recipe: str
    config: str
    stages: list[Rehearsed]
    expected: list[StageEstimate]


PROMPTS, STEPS, LINES = 4, 3, 32
QUESTIONS, HELD_OUT_SHARE = 48, 0.25  # of the target's own at least, and the share of them for validation and for test
RESULT = "rehearsal.json"
INTERVAL = 0.02  # seconds between samples of memory: a model's load or a batch lasts longer
SUFFIX = "-rehearsal"


def _with(section: Any, values: dict[str, Any]) -> Any:
    """A section with these values at dotted keys; what lies in a section that is off is left out."""
    if section is None:
        return None
    own: dict[str, Any] = {}
    for key, value in values.items():
        name, dot, rest = key.partition(".")
        own[name] = _with(own.get(name, getattr(section, name)), {rest: value}) if dot else value
    return section.model_copy(update=own)


def shortened(recipe: Recipe, runs: Path) -> Recipe:
    """The recipe of a rehearsal in the folder `runs`; RecipeError if a shortened value is not a valid one."""
    name = recipe.name[: 100 - len(SUFFIX)] + SUFFIX
    train, speedup, processes = recipe.train, recipe.speedup, process_count()
    steps = STEPS
    if train.sparsity is not None:  # which takes a number of steps to remove anything
        steps = max(STEPS, math.ceil(MIN_RAMP_STEPS / train.sparsity.ramp))
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
    if processes > 1:  # each needs a group of prompts and a shard of distributions
        values["answers.group"] = min(recipe.answers.group, max(1, PROMPTS // processes))
        values["teacher.shard_blocks"] = 1
    return parse_recipe(_with(recipe, values).model_dump(mode="json"), f"the rehearsal of {recipe.name}")


def _shortened_corpus(recipe: Recipe) -> Any:
    """Fewer tokens, and fewer questions of the target's own: of those, a larger share is held out, so that each split
    has some."""
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
    """Run the stages of `short` in `run`, up to `until`, and return the table of what `recipe` will take, in Markdown,
    with a verdict on this machine.

    The next one goes on where it ended or was killed; that of another recipe is replaced. Raises RunError where the
    folder is a run that no rehearsal made.
    """
    path, config = run.path(RESULT), dump_recipe(short)
    if run.folder.exists() and not path.exists() and any(run.folder.iterdir()):
        raise RunError(f"{run.folder} is a run and no rehearsal", "rename it, or give the recipe another name")
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
    forget_begun(run)  # what is left of such a stage would be taken for the whole of it
    write_result(path, Rehearsal(recipe.name, config, done, []))
    traffic, own = recipe.answers.traffic, short.answers.traffic
    if traffic is not None and own is not None and not Path(own).exists():
        lines = first_lines(Path(traffic), LINES)
        write_atomically(Path(own), lambda place: place.write_bytes(lines))
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
    """What each stage will take, and by what that is known: by a rehearsal of the recipe beside `folder`; without
    one, on a CPU, by counts and sizes, with these `prompts` to answer; else none."""
    short = shortened(recipe, folder.parent)
    with contextlib.suppress(DataError):
        found = read_result(folder.parent / short.name / RESULT, Rehearsal)
        if found.config == dump_recipe(short):
            return found.expected, "by the rehearsal"
    if not prompts or pick_device(recipe.device).type != "cpu":
        return [], ""
    return planned_hours(recipe, prompts, products_per_second(recipe.target.dtype)), "by counts and sizes"


def expected_lines(found: Sequence[StageEstimate], source: str) -> list[str]:
    """A line for each of `expected_stages` on time, memory and disk."""
    return [
        f"{one.stage}: {bounds(one.low, one.high)}, "
        f"{size(one.device_bytes or one.memory_bytes)} of memory, {size(one.disk_bytes)} on disk, {source}"
        for one in found
    ]


@functools.cache  # in a process: a sweep asks for each run
def products_per_second(dtype: str) -> float:
    """How many products and sums this CPU makes in large matrices, as busy as it is: the best of a few."""
    matrix = torch.ones(1024, 1024, dtype=DTYPES[dtype])
    return 2 * 1024**3 / min(timeit.repeat(lambda: matrix @ matrix, number=1, repeat=12))


def verdicts(expected: Sequence[StageEstimate], place: Path) -> list[str]:
    """A line each on memory and disk: whether this machine has what the whole run is expected to take."""
    import psutil

    disk, free = sum(stage.disk_bytes for stage in expected), shutil.disk_usage(place).free
    memory, total = max(stage.memory_bytes for stage in expected), psutil.virtual_memory().total
    lines = []
    for what, needed, available in (("disk", disk, free), ("memory", memory, total)):
        fits = "fits" if needed <= available else "warning: does not fit"
        own = "free here" if what == "disk" else "in this machine"
        lines.append(f"{what}: {fits}, {size(needed)} to expect, {size(available)} {own}")
    return lines


def _measured(run: Run, name: str, loops: list[Progress], memory: tuple[int, int]) -> Rehearsed:
    record = run.done(name) or {}
    disk = 0
    for place in find_stage(name).writes:
        path = run.path(place)
        disk += sum(file.stat().st_size for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file())
    return Rehearsed(name, record.get("seconds", 0.0), sum(loop.seconds for loop in loops), *memory, disk)


class MemoryWatch:
    """Peak memory of this process, sampled by a thread within a `with` block; of accelerators from torch's counters."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._peak = 0
        self._lock = threading.Lock()  # a sample taken before `take` must not be noted after it
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
        """Bytes of the process and of all accelerators at their peaks since the last call; frees what is not used."""
        with self._lock:
            found = max(self._peak, self._process.memory_info().rss), take_peaks()
            gc.collect()
            self._peak = 0
        return found
