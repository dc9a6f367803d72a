"""What the later stages would refuse, asked before the first one: devices, packages, keys, adapters, files to export.

Each check reads configurations and tokenizers alone, asks the very code that would refuse later, and returns lines to
print.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from distill.errors import DataError, DistillError, RecipeError
from distill.machine import faster_type
from distill.recipe import Recipe

if TYPE_CHECKING:
    from distill.corpus.sources import Document

MOST_DOCUMENTS, MOST_RECORDS, MOST_LINES = 1000, 20, 1000  # read of a local source, a hub data set and a traffic file
SCORED = "⟦", "⟧"  # around the tokens that a draft learns from
FEW_DOCUMENTS = 8  # an interval over fewer is too narrow


def check_corpus(recipe: Recipe, offline: bool) -> tuple[list[str], list[str], list[Document]]:
    """Read the beginning of each source of the corpus; lines to print, the names of sources that were not read, and
    the documents.

    Raises DataError for a source that is missing, empty or without the field that it names; where all sources were read
    to their ends, also for a corpus without a needed split.
    """
    from distill.corpus.sources import UNREAD, read_documents, require_splits

    corpus, lines, unread = recipe.corpus, [], []
    documents: list[Document] = []
    dropped: Counter[str] | None = None
    for source in corpus.sources:
        if source.kind == "target":
            continue  # check_questions
        if source.kind == "hub" and offline:
            unread.append(f"data set {source.path}")
            continue
        most = min(corpus.max_documents, MOST_RECORDS if source.kind == "hub" else MOST_DOCUMENTS)
        found, left_out = read_documents(corpus.model_copy(update={"sources": (source,), "max_documents": most}), ())
        whole = not left_out.pop(UNREAD, 0) or most == corpus.max_documents
        if not whole:
            unread.append(f"{source.path} beyond its first {most} documents")
        documents += found
        dropped = left_out if dropped is None else dropped + left_out
        rest = "".join(f", {count} dropped: {reason}" for reason, count in left_out.items())
        lines.append(f"corpus source {source.path}: {len(found)} documents{'' if whole else ' and more'}{rest}")
    if corpus.asked:
        return lines + _check_shares(recipe, documents), unread, documents
    if not unread and dropped is not None:
        require_splits(documents, dropped)
        held_out = sum(document.split == "test" for document in documents)
        if held_out < FEW_DOCUMENTS and recipe.answers.traffic is None:
            lines.append(
                f"warning: the test split has {held_out} documents; intervals over fewer than {FEW_DOCUMENTS} are too "
                "narrow to be believed"
            )
    return lines, unread, documents


def _check_shares(recipe: Recipe, documents: list[Document]) -> list[str]:
    """A warning for each split that may get too few documents from the target's questions, which a hash divides."""
    from distill.corpus.splits import SPLITS

    corpus, lines = recipe.corpus, []
    parts = {"validation": corpus.validation, "test": corpus.test, "train": 1 - corpus.validation - corpus.test}
    for split in SPLITS:
        count = float(sum(document.split == split for document in documents))
        for source in corpus.asked:
            if split in source.keep:
                count += (source.questions or 0) * (
                    parts[split] if source.split == "by-name" else source.split == split
                )
        if count < FEW_DOCUMENTS and recipe.answers.traffic is None:
            lines.append(
                f"warning: about {count:.1f} documents go to the {split} split; raise questions, or corpus.{split}"
                if split != "train"
                else f"warning: about {count:.1f} documents go to the train split; raise questions"
            )
    return lines


def check_questions(recipe: Recipe) -> list[str]:
    """The target's template has a user header that questions can be written behind, and a block has room for them."""
    if not recipe.corpus.asked:
        return []
    from distill.target.questions.asking import describe

    return describe(recipe)


def check_traffic(recipe: Recipe) -> list[str]:
    """Sort the first lines of the traffic file; raises DataError where none of a whole file can be learnt from."""
    from distill.models.hugging_face import load_tokenizer
    from distill.target.traffic import measure, read_lines, require_answers, sort_lines

    settings = recipe.answers.traffic
    if settings is None:
        return []
    pin = {"path": settings.path, **measure(Path(settings.path)), "start": 0, "start_line": 0}
    tokenizer = load_tokenizer(recipe.target.model)
    read = islice(read_lines(settings, pin), MOST_LINES)
    found = sort_lines(recipe, read, tokenizer, tokenizer.eos_token_id)
    if pin["lines"] <= MOST_LINES:
        require_answers(found, pin, "the same command")
    first = f", first {found.bad[0]}" if found.bad else ""
    return [
        f"traffic {settings.path}: {pin['lines']} lines; of the first {min(MOST_LINES, pin['lines'])}, "
        f"{len(found.train)} answers to learn from, {len(found.bad)} bad lines{first}, {found.too_long} too long"
    ]


def check_writer(recipe: Recipe, offline: bool) -> tuple[list[str], list[str]]:
    """The file or the servers that write the answers; lines to print, and the servers that were not asked."""
    from distill.target.writers.writing import check_writer

    writer = recipe.answers.writer
    if writer is not None and writer.urls and offline:
        return [], [f"server {url}" for url in writer.urls]
    return check_writer(recipe), []


def check_teacher(recipe: Recipe, offline: bool) -> list[str]:
    """The teacher's GGUF file has the target's tokens, or its servers answer with log-probabilities of prompts."""
    settings = recipe.teacher
    if settings.gguf is not None:
        from distill.target.logprobs.gguf_reader import require_gguf

        return [require_gguf(settings.gguf, recipe.target.model, recipe.corpus.block)]
    if settings.server is None:
        return []
    at_one = "its distributions hold at temperature 1, whatever sampler it serves with"
    if offline:
        return [f"teacher: {settings.server.model} on {len(settings.server.urls)} server(s), not asked; {at_one}"]
    from distill.target.logprobs.server_reader import open_server

    with contextlib.closing(open_server(recipe)) as reader:
        return [
            f"teacher: {settings.server.model} answers on {len(settings.server.urls)} server(s), with {reader.asked} "
            f"log-probabilities a token; {at_one}"
        ]


def check_device(recipe: Recipe) -> list[str]:
    """The device exists, holds the target as asked, and suits the processes of this command."""
    from distill.models.hugging_face import check_placement, pick_device
    from distill.training.setup import require_processes

    device = pick_device(recipe.device)
    if recipe.pytorch.draft_device is not None:
        pick_device(recipe.pytorch.draft_device)
    check_placement(recipe.target.quantise, device, recipe.target.shard)
    require_processes(recipe, device)
    if recipe.train.adapter is not None and recipe.train.adapter.base is not None:
        from distill.training.adapters import require_quantisation

        require_quantisation(device, recipe.train.adapter.base)
    return [f"device: {device}", *(_slow_types(recipe) if device.type == "cpu" else [])]


def _slow_types(recipe: Recipe) -> list[str]:
    """A warning for each type that this processor has no instructions for."""
    lines = []
    for key, dtype in (("target.dtype", recipe.target.dtype), ("train.dtype", recipe.train.dtype)):
        faster = faster_type(dtype)
        if faster is not None:
            lines.append(
                f"warning: this CPU has no instructions for {dtype} and computes it slowly: {key}={faster} is faster"
            )
    return lines


def check_trackers(recipe: Recipe) -> list[str]:
    """The packages and keys of the trackers are here."""
    from distill.training.trackers import require_trackers

    require_trackers(recipe.train.trackers)
    return []


def check_draft(recipe: Recipe) -> list[str]:
    """The losses take the draft's logits and vocabulary, and its layers have the names that adapters ask for."""
    import torch
    from transformers import AutoModelForCausalLM

    from distill.models.hugging_face import load_config, load_tokenizer, real_tokens
    from distill.training.adapters import layer_names
    from distill.training.loading import require_plain_logits
    from distill.training.plan import planned

    config = load_config(recipe.donor_model)
    require_plain_logits(config)
    target = load_config(recipe.target.model).get_text_config()
    tokens = real_tokens(target, load_tokenizer(recipe.target.model))
    trim = recipe.cut.trim
    for part in planned(recipe.train, recipe.sampler.temperature, recipe.corpus.block):
        part.loss.require_columns(tokens if trim is None or trim.size is None else trim.size)
    if recipe.train.adapter is not None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        layer_names(model, recipe.train.adapter.targets)
    return []


def check_static(recipe: Recipe) -> list[str]:
    """Target and donor can decode with a static cache where the recipe asks for one."""
    import torch
    from transformers import AutoModelForCausalLM

    from distill.models.hugging_face import load_config

    if not recipe.pytorch.static or "pytorch" not in recipe.speedup.backends:
        return []
    from distill.models.static.static_model import require_static

    for reference in dict.fromkeys([recipe.target.model, recipe.donor_model]):
        with torch.device("meta"):  # its layers and its attention, without weights
            require_static(AutoModelForCausalLM.from_config(load_config(reference)), reference)
    return []


def check_export(recipe: Recipe) -> list[str]:
    """Target and draft can be written as GGUF, and llama.cpp is here to read them, where the recipe asks for files."""
    from distill.models.conversion.model_shape import read_shape
    from distill.models.conversion.tokenizer import read_tokenizer
    from distill.models.hugging_face import load_config, local_snapshot, text_folder
    from distill.surgery.grow import check_growth

    load = recipe.target.load
    if load and recipe.speedup.grown is not None:
        check_growth(load_config(recipe.target.model), recipe.speedup.grown.layers)
    if not recipe.export.outtypes and not (load and "gguf" in recipe.speedup.backends):
        return []
    without = "train without GGUF files: export.outtypes=[] speedup.backends=[pytorch]"
    for package, name in (("gguf", "gguf"), ("llama_cpp", "llama-cpp-python")):
        if importlib.util.find_spec(package) is None:
            raise RecipeError(
                f"export.outtypes and speedup.backends ask for GGUF files, and {name} is not installed",
                f"pip install 'distill[llama]'; or {without}",
            )
    lines = []
    for model in dict.fromkeys([recipe.target.model, recipe.donor_model]):
        written = load or model != recipe.target.model  # the draft has the target's tokenizer in any case
        if not written:
            folder: Path | None = text_folder(model)
        else:
            folder = local_snapshot(model)
        if folder is None:
            lines.append(f"export of {model}: not checked, its files are not on this machine yet")
            continue
        try:
            rows = read_shape(folder).vocabulary if written else load_config(model).get_text_config().vocab_size
            if model == recipe.target.model:  # whose tokenizer the draft has
                read_tokenizer(folder, rows)
        except DistillError as error:
            raise type(error)(f"export: {error.what}", f"{error.hint}; or {without}") from error
    return lines


def check_gguf(recipe: Recipe) -> list[str]:
    """The build of llama.cpp, and that it can do what section gguf asks; nothing where no GGUF file is opened."""
    writer = recipe.answers.writer
    target = recipe.teacher.gguf is not None or (writer is not None and writer.gguf is not None)
    timed = recipe.target.load and "gguf" in recipe.speedup.backends
    search = recipe.cut.search is not None and recipe.cut.search.backend == "gguf"
    given = {role for role in ("target", "draft") if getattr(recipe.gguf, role).given()}
    unused = given - ({"target", "draft"} if timed or search else {"target"} if target else set())
    if unused:
        raise RecipeError(
            f"gguf.{min(unused)} has options, and this recipe opens no GGUF file of the {min(unused)}",
            "leave them out, or measure GGUF files: speedup.backends=[gguf]",
        )
    if not (target or timed or search) or importlib.util.find_spec("llama_cpp") is None:
        return []  # stages that need the library say so
    from distill.models.gguf.build import describe_build, require_build, require_cache_types
    from distill.models.hugging_face import load_config

    for role, model in (("target", recipe.target.model), ("draft", recipe.donor_model)):
        options = recipe.gguf_options("target" if role == "target" else "draft")
        require_build(options, f"gguf.{role}")
        config = load_config(model).get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        require_cache_types(options, size, size, f"gguf.{role}")
    lines = [describe_build()]
    return [*lines, f"llama.cpp's options: {recipe.gguf.described()}"] if given else lines


def check_chat(recipe: Recipe, documents: list[Document]) -> list[str]:
    """The target's template takes the conversations; the first one as it is rendered, its scored answer marked.

    Raises DataError or RecipeError where it takes none of them.
    """
    from distill.corpus.stage import chat_prompts
    from distill.models.hugging_face import load_tokenizer

    chat = chat_prompts(recipe, load_tokenizer(recipe.target.model), documents)
    if chat is None:
        return []
    for document in documents:
        if document.messages is None:
            continue
        prompt = chat.prompt(document)
        if prompt is None:
            continue
        decode = chat.template.tokenizer.decode
        lines = [f"a prompt, as the target's template writes it ({len(prompt.ids)} tokens):", decode(prompt.ids)]
        given = next(chat.given(document), None)
        if given is not None:
            lines += [
                f"its last given answer, {len(given[1])} tokens that are scored between ⟦ and ⟧:",
                f"{decode(given[0])}{SCORED[0]}{decode(given[1])}{SCORED[1]}",
            ]
        return lines
    reasons = ", ".join(f"{count} {reason}" for reason, count in chat.dropped.items())
    raise DataError(f"no conversation of the corpus can be asked: {reasons}", "correct the sources, or section chat")
