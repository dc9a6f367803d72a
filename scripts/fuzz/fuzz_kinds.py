"""The kinds of input of scripts/fuzz/fuzz.py: how inputs of each kind are made, and the readers that get them."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest import mock

import fuzz_chats
import fuzz_conversations
import fuzz_gguf
import fuzz_records
import fuzz_requests
import fuzz_weights
import yaml
from chat_templates import QWEN_3
from fuzz_inputs import Tree, dumped, edited_bytes, fractions, texts, values, weighted
from hypothesis import strategies as st

from distill.errors import DataError, DistillError
from distill.recipe import Chat, Corpus, Recipe, Source, dump_recipe, load_recipe
from distill.run import Run

Readers = list[Callable[[], Any]]
Strategy = st.SearchStrategy[Any]


class World:
    """The valid files that inputs are made from, and a folder of this process to write inputs to."""

    def __init__(self, base: Path, place: Path) -> None:
        """`base` holds target/, recipe.yaml and a finished run in runs/tiny, as tests/tiny.py makes them."""
        self.base, self.place = base, place
        self.open = contextlib.ExitStack()  # It is closed at the end of the process.
        self.changed: set[str] = set()  # files of the run's copy that differ from the finished run
        self.target, self.finished = base / "target", base / "runs" / "tiny"

    def put(self, name: str, data: bytes) -> Path:
        """Write a file to the folder."""
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    @cached_property
    def recipe_path(self) -> Path:
        """Return the small recipe's path, for overrides."""
        return self.put("small.yaml", (self.base / "recipe.yaml").read_bytes())

    @cached_property
    def recipe(self) -> Recipe:
        """Return the small recipe."""
        return load_recipe(self.base / "recipe.yaml")

    @cached_property
    def model(self) -> Path:
        """Return a copy of the target's folder, in which a kind replaces files."""
        return Path(shutil.copytree(self.target, self.place / "model"))

    def restore_model(self, name: str) -> None:
        """Restore one file of the model's folder."""
        if (self.target / name).exists():
            shutil.copyfile(self.target / name, self.model / name)
        else:
            (self.model / name).unlink(missing_ok=True)

    @cached_property
    def run(self) -> Run:
        """Return a copy of the finished run, in which a kind replaces files."""
        return Run(Path(shutil.copytree(self.finished, self.place / "runs" / "tiny")), self.recipe)

    @cached_property
    def tokens(self) -> Any:
        """Return the target's vocabulary as grammars need it."""
        from distill.decoding.grammar import Tokens
        from distill.vocabulary.vocabulary import Vocabulary

        vocabulary = Vocabulary.read(self.target)
        return Tokens.of(vocabulary, [vocabulary.roles["eos"]])

    @cached_property
    def tokenizer(self) -> Any:
        """Return the target's tokenizer, with a template that writes thinking, tools and documents."""
        from distill.engines.torch.hugging_face import load_tokenizer

        found = load_tokenizer(str(self.target))
        found.chat_template = QWEN_3 + "{{ documents or '' }}"
        return found

    @cached_property
    def server(self) -> Any:
        """Return `distill serve` of the target with that template. It decodes nothing."""
        from distill.engines.loaded import Opening
        from distill.recipe import Configuration, Sampler, Target
        from distill.serving.answering import Continuation, answering
        from distill.serving.completions import Completions

        folder = Path(shutil.copytree(self.target, self.place / "served"))
        (folder / "chat_template.jinja").write_text(QWEN_3 + "{{ documents or '' }}")
        request = Continuation(Configuration(drafter="lookup"), Sampler(temperature=0))
        opening = Opening(Target(model=str(folder)), None, "cpu", 1)
        self.open.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return Completions(self.open.enter_context(answering(opening, Chat(), request, 512)), request, "m", 1)

    def json(self, name: str) -> Any:
        """Return a JSON file of the base."""
        return json.loads((self.base / name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Kind:
    """A kind of input: its share of all inputs, its strategy, and the readers that get an input.

    Inputs of an `isolated` kind are each read in a process of their own, because C code may end the process.
    `most_seconds` is the limit of one input. `batch` is the number of inputs that are repeated after a kill.
    """

    name: str
    share: float
    inputs: Callable[[World], Strategy]
    readers: Callable[[World, Any], Readers]
    isolated: bool = False
    most_seconds: float = 10.0
    batch: int = 500


def restored(world: World, name: str) -> Path:
    """Return a file of the copied run. The file that was replaced before is restored first."""
    path = world.run.path(name)
    if (world.finished / name).exists():
        shutil.copyfile(world.finished / name, path)
    else:
        path.unlink(missing_ok=True)
    return path


# ── Recipes and overrides ──

LINES = [
    *("seed: !!python/object/apply:os.system [ls]", "? [1]\n: 2", "a: &a [*a]", "<<: {seed: 1}", "%YAML 9.9\n---"),
    *("seed: 0x10", "seed: 1_000", "seed: 010", "seed: 12:30:45", "name: 2026-01-01", "name: yes", "--- a\n--- b"),
    *("train: {rate: .inf}", "name: !!binary aGk=", "\ttrain: 1", "name: 'a", 'name: "\\ud800"', "x: |\n  a", "@"),
    *("corpus: {sources: [{kind: tree, path: .}]}", "sampler: {temperature: -0.0}", "{", "[", "- - - -", "a: b: c"),
]


def recipe_files(world: World) -> Strategy:
    small = yaml.safe_load((world.base / "recipe.yaml").read_text(encoding="utf-8"))
    whole = world.recipe.model_dump(mode="json")
    plain = yaml.safe_dump(small).encode()
    lines = st.lists(st.sampled_from(LINES) | texts, min_size=1, max_size=3).map(
        lambda found: plain + "\n".join(found).encode("utf-8", "surrogatepass")
    )
    edited = Tree(small).edited().map(dumped)
    sections = Tree({name: value for name, value in whole.items() if isinstance(value, dict)})
    more = st.builds(
        lambda name, found: dumped({**small, name: found.get(name) if isinstance(found, dict) else found}),
        st.sampled_from(list(sections.value)),
        sections.edited(),
    )
    return weighted((4, edited), (3, more), (2, edited_bytes(plain)), (2, lines), (1, st.binary()))


def read_recipe(world: World, found: bytes) -> Readers:
    path = world.put("recipe.yaml", found)
    return [lambda: dump_recipe(load_recipe(path))]


def overrides(world: World) -> Strategy:
    paths = [path for path in Tree(world.recipe.model_dump(mode="json")).paths if path]
    names = weighted(
        (6, st.sampled_from([".".join(map(str, path)) for path in paths])),
        (1, st.sampled_from(["corpus.sources.99.path", "corpus.sources.-1", "train..steps", ".", "", "a.b", "name.x"])),
        (1, texts),
    )
    given = weighted((4, values.map(lambda value: dumped(value).decode())), (1, texts), (1, st.sampled_from(LINES)))
    one = weighted((6, st.builds(lambda name, value: f"{name}={value}", names, given)), (1, texts))
    return st.lists(one, min_size=1, max_size=3)


def read_overrides(world: World, found: Sequence[str]) -> Readers:
    return [lambda: load_recipe(world.recipe_path, found)]


# ── jsonl ──


def lines_of(records: Sequence[Any]) -> Strategy:
    """Return files of edited records, of records with edited bytes, and of neither."""
    trees = [Tree(record) for record in records]
    line = st.sampled_from(trees).flatmap(lambda tree: tree.files())
    return weighted(
        (4, st.lists(line, max_size=4).map(b"\n".join)),
        (2, st.lists(line, max_size=4).map(lambda found: b"\xef\xbb\xbf" + b"\r\n".join(found) + b"\n")),
        (2, edited_bytes(b"".join(dumped(record) + b"\n" for record in records))),
        (1, st.binary(max_size=60)),
    )


def corpora(world: World) -> Strategy:
    return lines_of([{"text": "alpha beta", "other": [1, {"a": None}]}, {"text": "x" * 40}, {"body": "b"}])


def read_corpus(world: World, found: bytes) -> Readers:
    from distill.data.sources import read_documents

    path = str(world.put("texts.jsonl", found))
    plain = str(world.put("text.txt", found))
    return [
        lambda: read_documents(Corpus(sources=(Source(kind="jsonl", path=path, split="train"),)), ("train",)),
        lambda: read_documents(Corpus(sources=(Source(kind="text", path=plain, split="train"),)), ("train",)),
    ]


def read_data_records(world: World, found: list[Any]) -> Readers:
    from distill.data.chat_template import ChatTemplate
    from distill.data.prompts import ChatPrompts
    from distill.data.sources import read_documents

    chat = ChatPrompts(ChatTemplate(world.tokenizer, Chat()), 10**6, 0)
    lines = "".join(json.dumps(record) + "\n" for record in found)
    path = str(world.put("records.jsonl", lines.encode("utf-8", "surrogatepass")))

    def whole() -> None:
        documents, dropped = read_documents(Corpus(sources=(Source(kind="jsonl", path=path, split="train"),)), ())
        wrong = fuzz_records.lost(found, documents, dropped)
        for document in documents:
            if not wrong and document.messages is not None:
                wrong = fuzz_records.learnt_without(document, chat)
        if wrong:
            raise Wrong(f"a silent change: {wrong}; counted: {dict(dropped + chat.dropped)}")

    return [whole]


def compared(fault_of: Callable[[Any], str | None], world: World, found: Any) -> Readers:
    """Return the reader of an input that contains the right result."""

    def whole() -> None:
        if wrong := fault_of(found):
            raise Wrong(f"a silent change: {wrong}")

    return [whole]


def read_served(world: World, found: Any) -> Readers:
    """Read the fields of a request as `distill serve` does."""
    return compared(partial(fuzz_requests.fault_of_served, world.server), world, found)


def traffic(world: World) -> Strategy:
    messages = [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}]
    return lines_of([{"prompt": "alpha beta", "answer": "total", "finish_reason": "stop"}, {"messages": messages}])


def read_traffic(world: World, found: bytes) -> Readers:
    from distill.data.traffic import Sorted, begins_with, pin_of, read_lines, sort_lines, unfinished_line

    path = world.put("traffic.jsonl", found)
    pin = pin_of(path)

    def whole() -> None:
        for _ in sort_lines(world.recipe, read_lines(pin), world.tokenizer, Sorted()):
            pass
        assert begins_with(path, pin["parts"][0])
        unfinished_line(pin)

    return [whole]


# ── Records and results of a run ──

RECORDS = [
    *("stages/corpus.json", "stages/train.json", "stages/eval.json", "stages/redo.json", "stages/train.begun.json"),
    *("parent.json", "provenance.json", "metrics.jsonl", "eval.json", "speedup.json", "training.json"),
    *("cut/cut.json", "cut/surgery.json", "gguf/export.json"),
    *("corpus/prompts-test.arrow", "corpus/documents-test.json", "answers/train/00000.arrow", "cut/kept_tokens.json"),
    *("draft/sparsity.json", "config.yaml"),
]
MADE: dict[str, Any] = {  # valid contents of files that the tiny run does not have
    "stages/redo.json": {"asked": ["eval"], "started": ["eval"]},
    "parent.json": {"generation": 2, "run": "tiny.1", "digest": "0" * 64, "files": {}, "traffic": None},
    "cut/kept_tokens.json": {"format": 1, "vocabulary": 400, "kept": [0, 1, 2, 5, 399], "forced": 2},
    "draft/sparsity.json": {"sentence": "a", "layers": [], "before": 1, "after": 1},
}


def records(world: World) -> Strategy:
    found = []
    for name in RECORDS:
        path = world.finished / name
        if name.endswith(".arrow"):
            files = edited_bytes(path.read_bytes())
        elif name.endswith(".jsonl"):
            files = lines_of([json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:6]])
        elif name.endswith(".yaml"):
            files = Tree(yaml.safe_load(path.read_text(encoding="utf-8"))).files()
        else:
            begun = name.removesuffix(".begun.json")
            own = MADE.get(name)
            if own is None and name != begun:
                own = world.json(f"runs/tiny/{begun}.json")["inputs"]
            files = Tree(world.json(f"runs/tiny/{name}") if own is None else own).files()
        found.append(st.tuples(st.just(name), files))
    return st.sampled_from(range(len(found))).flatmap(lambda number: found[number])


def read_record(world: World, found: tuple[str, bytes]) -> Readers:
    name, data = found
    for other in RECORDS:
        if other != name and other in world.changed:
            restored(world, other)
    world.changed = {name}
    path = world.run.path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return _record_readers(world, name, path)


def _record_readers(world: World, name: str, path: Path) -> Readers:
    """Return the readers of one file of a run. A file without a reader of its own is read by the model card."""
    import torch

    from distill.cli.shared import find_run
    from distill.data.samples import read_answers, read_prompts
    from distill.engines.torch.hugging_face import read_kept
    from distill.files import read_json
    from distill.measuring.evaluation_results import EvaluationReport, evaluation_blocks
    from distill.measuring.speedup_results import SpeedupReport
    from distill.measuring.speedup_tables import speedup_blocks
    from distill.pipeline.running import plan_refresh, plan_run
    from distill.report.card import build_card, gather
    from distill.surgery.results import read_changes

    run, recipe, traffic = world.run, world.recipe, with_traffic(world)
    card: Readers = [lambda: build_card(gather(recipe, run)).encode()]
    refresh: Readers = [lambda: plan_refresh(traffic, run)]
    if name.startswith("stages/"):
        return [partial(plan_run, recipe, run), *(partial(run.verify, stage) for stage in ("eval", "corpus")), *refresh]
    if name.endswith(".arrow"):
        return [lambda: _ids(read_prompts(run, "test")), lambda: _ids(read_answers(run, "train"))]
    own: dict[str, Readers] = {
        "corpus/documents-test.json": [lambda: read_json(path, [str])],
        "config.yaml": [lambda: find_run("tiny", run.folder.parent)],
        "cut/surgery.json": [lambda: read_changes(path.parent)],
        "cut/kept_tokens.json": [lambda: torch.tensor((read_kept(path.parent) or {"kept": []})["kept"])],
        "parent.json": [*card, partial(plan_run, traffic, run), *refresh],
        "eval.json": [lambda: _printed(path, EvaluationReport, evaluation_blocks)],
        "speedup.json": [lambda: _printed(path, SpeedupReport, speedup_blocks)],
    }
    return own.get(name, card)


def with_traffic(world: World) -> Recipe:
    """Return the recipe with a file of traffic."""
    path = world.place / "served.jsonl"
    if not path.exists():
        path.write_text('{"prompt": "alpha", "answer": "beta"}\n')
    answers = world.recipe.answers.model_copy(update={"traffic": str(path)})
    return world.recipe.model_copy(update={"answers": answers})


def _ids(found: Sequence[Any]) -> None:
    """Use the ids as every user of prompts and answers does."""
    import torch

    for one in found:
        torch.tensor([*one.prompt, *one.answer], dtype=torch.int32)


def _printed(path: Path, kind: Any, blocks_of: Callable[[Any], Any]) -> None:
    """Render the tables that commands print from results."""
    from distill.files import read_result
    from distill.tables import document, records

    blocks = blocks_of(read_result(path, kind))
    records(blocks), document(blocks).encode()


# ── Model folders ──


def safetensors_bytes(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """Return a safetensors file made from its parts."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def header_of(path: Path) -> tuple[Any, bytes]:
    """Return the header and the data of a safetensors file."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def safetensors(path: Path) -> tuple[Strategy, Strategy]:
    """Return copies of a safetensors file with an edited header, and copies with edited bytes."""
    header, data = header_of(path)
    plain = dumped(header)
    edited = Tree(header).edited().map(lambda found: safetensors_bytes(dumped(found), data))
    return edited, edited_bytes(safetensors_bytes(plain, data), 8 + len(plain))


def weight_files(world: World) -> Strategy:
    header, data = header_of(world.target / "model.safetensors")
    by_header, by_bytes = safetensors(world.target / "model.safetensors")
    names = ["model.safetensors", "missing.safetensors", "../x", "", "a\0b", ".", "tokenizer.json", 3, None, ["x"]]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(header, "model.safetensors")}
    maps = st.dictionaries(st.sampled_from(list(header)), st.sampled_from(names), max_size=3)
    lengths = st.sampled_from([0, 1, 2**20, 2**31, 2**40, 2**63])
    weights = weighted(
        (6, by_header),
        (3, by_bytes),
        (1, lengths.map(lambda length: safetensors_bytes(dumped(header), data, length))),
        (1, values.map(lambda found: safetensors_bytes(dumped(found), b""))),
    )
    indices = weighted((3, Tree(index).files()), (1, maps.map(lambda found: dumped({"weight_map": found}))))
    return weighted(
        (3, st.tuples(st.just("model.safetensors"), weights)),
        (1, st.tuples(st.just("model.safetensors.index.json"), indices)),
    )


def read_weights(world: World, found: tuple[str, bytes]) -> Readers:
    from distill.folders import stored_tensors
    from distill.gguf.fields import read_shape
    from distill.gguf.writer import read_tensors

    name, data = found
    world.restore_model("model.safetensors")
    (world.model / "model.safetensors.index.json").unlink(missing_ok=True)
    (world.model / name).write_bytes(data)

    def export() -> None:
        for tensor in read_tensors(world.model, read_shape(world.model)):
            tensor.read(0, tensor.shape[0])

    def stored() -> None:
        for tensor in stored_tensors(world.model, tied=True).values():
            tensor.read()

    return [stored, export]


def tables(world: World) -> Strategy:
    from distill.decoding.ngrams import count_ngrams, write_table

    path = world.place / "whole.safetensors"
    write_table(path, count_ngrams([[i * i % 11 for i in range(60)], [3, 4, 3, 4, 5]]), {"tokenizer": "ours"})
    return st.one_of(*safetensors(path))


def read_tables(world: World, data: bytes) -> Readers:
    from distill.decoding.ngrams import NGramTable
    from distill.decoding.table_drafter import TableDrafter

    def draft() -> None:
        drafter = TableDrafter(NGramTable.open(world.put("ngrams.safetensors", data), "ours"), 8, 4)
        drafter.begin([])
        assert all(0 <= token < 11 for token in drafter.propose([1, 4, 9, 5, 3], 8, ()).tokens)

    return [draft]


def read_whole_model(world: World, found: tuple[str, bytes]) -> Readers:
    """Return the slow readers of a model's folder: transformers itself, on no values and on all."""
    import torch

    from distill.engines.torch.hugging_face import check_weights, load_model

    name, data = found
    for other in ("model.safetensors", "config.json", "generation_config.json", "model.safetensors.index.json"):
        world.restore_model(other)
    (world.model / name).write_bytes(data)
    place = str(world.model)
    return [lambda: check_weights(place), lambda: load_model(place, "float32", torch.device("cpu"))]


def mixed_weights(world: World) -> Strategy:
    return fuzz_weights.steps()


def read_mixed_weights(world: World, found: tuple[int, list[fuzz_weights.Step]]) -> Readers:
    parts, steps = found
    model = fuzz_weights.Model(world.place / "mixed", world.target, parts)
    for step in steps:
        model.take(*step)
    model.write()
    return fuzz_weights.readers_of(model.folder, world.target)


def configurations(world: World) -> Strategy:
    more: dict[str, Any] = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "head_dim": 16, "text_config": {}}
    more |= {"sliding_window": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 30.0, "logits_scaling": 8.0}
    base = world.json("target/config.json")
    gemma = ("gemma", "gemma2", "gemma3", "gemma3_text")
    others = ("bert", "gpt2", "mixtral", "t5", "mamba", "x")
    types = st.sampled_from(["llama", "mistral", "qwen3", "phi3", "smollm3", "granite", *gemma, *others])
    other = st.builds(lambda kind, edited: dumped({**base, **edited, "model_type": kind}), types, _objects(base | more))
    return weighted((3, Tree(base).files()), (2, Tree(base | more).files()), (2, other))


def _objects(base: Any) -> Strategy:
    return Tree(base).edited().map(lambda found: found if isinstance(found, dict) else {})


def read_configuration(world: World, found: bytes) -> Readers:
    from distill.engines.loaded import context_of
    from distill.engines.pairs import VocabularyMetadata
    from distill.engines.torch.hugging_face import load_config
    from distill.gguf.fields import add_model_fields, read_shape, rope_tensors
    from distill.gguf.head import write_head
    from distill.surgery.vocabulary import check_transplant

    def export() -> None:
        import gguf

        shape = read_shape(world.model)
        writer = gguf.GGUFWriter(path=None, arch=shape.architecture)
        add_model_fields(writer, shape)
        write_head(world.place / "head.gguf", writer, [])
        rope_tensors(shape)

    world.restore_model("model.safetensors")
    (world.model / "config.json").write_bytes(found)
    place = str(world.model)
    return [
        lambda: load_config(place),
        lambda: VocabularyMetadata.read(place),
        export,
        lambda: (context_of(place) or 0) > 512,
        lambda: check_transplant(world.model, world.target),
        lambda: check_transplant(world.target, world.model),
    ]


def whole_models(world: World) -> Strategy:
    generation = Tree(world.json("target/generation_config.json")).files()
    return weighted(
        (2, weight_files(world)),
        (2, st.tuples(st.just("config.json"), configurations(world))),
        (1, st.tuples(st.just("generation_config.json"), generation)),
    )


TOKENIZER_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "truncation", "padding")
TEMPLATES = ["{% for m in messages %}{{ m.content }}{% endfor %}", "{{ raise_exception('no') }}", "{{ messages[9].x }}"]


def tokenizer_files(world: World) -> Strategy:
    content, settings = world.json("target/tokenizer.json"), world.json("target/tokenizer_config.json")
    model = {**content["model"], "byte_fallback": True, "vocab": {"▁": 0, "a": 1, "▁a": 2, "<0x0A>": 3}}
    model["merges"] = [["▁", "a"]]
    pieces = {**content, "model": model, "normalizer": None, "pre_tokenizer": {"type": "Metaspace"}, "decoder": None}
    more = {
        **settings,
        "added_tokens_decoder": {"5": {"content": "x", "special": True}},
        "chat_template": [{"name": "default", "template": TEMPLATES[0]}],
        "bos_token": {"content": "<s>"},
        "tokenizer_class": "Qwen2Tokenizer",
    }
    special = {"eos_token": "<|endoftext|>", "pad_token": {"content": "p", "lstrip": False}}
    padded = {
        **content,
        "padding": {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
        | {"pad_to_multiple_of": None},
    }
    words = {**content, "model": {**content["model"], "vocab": {"a": 0, "b": 2**32 - 1}, "merges": []}}
    template = st.sampled_from([found.encode() for found in TEMPLATES]).flatmap(edited_bytes)
    return weighted(
        (2, st.tuples(st.just("tokenizer.json"), Tree(content, (*TOKENIZER_PARTS, "model")).files())),
        (3, st.tuples(st.just("tokenizer.json"), Tree(content, TOKENIZER_PARTS).files())),
        (2, st.tuples(st.just("tokenizer.json"), Tree(pieces).files())),
        (1, st.tuples(st.just("tokenizer.json"), st.sampled_from([dumped(padded), dumped(words)]))),
        (2, st.tuples(st.just("tokenizer_config.json"), Tree(more).files())),
        (1, st.tuples(st.just("special_tokens_map.json"), Tree(special).files())),
        (1, st.tuples(st.just("chat_template.jinja"), template)),
    )


def read_tokenizers(world: World, found: tuple[str, bytes]) -> Readers:
    from distill.engines.pairs import VocabularyMetadata
    from distill.folders import copy_tokenizer
    from distill.gguf.tokenizer import read_tokenizer
    from distill.vocabulary.encoding import Encoder
    from distill.vocabulary.vocabulary import Vocabulary

    name, data = found
    for other in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        world.restore_model(other)
    (world.model / name).write_bytes(data)
    copy = world.place / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    shutil.copyfile(world.target / "config.json", copy / "config.json")

    def encoder() -> None:
        own = Encoder(Vocabulary.read(world.model))
        own.text("def alpha(): é\n".encode() + b"\xff"), own.opening, own.leads(True)

    return [
        lambda: Vocabulary.read(world.model).missing_bytes,
        encoder,
        lambda: VocabularyMetadata.read(str(world.model)),
        lambda: read_tokenizer(world.model, 400),
        lambda: copy_tokenizer(world.model, copy),
    ]


def read_slow_tokenizers(world: World, found: tuple[str, bytes]) -> Readers:
    """Return transformers' own reader of a tokenizer, and its chat template on messages."""
    from distill.data.chat_template import ChatTemplate
    from distill.data.traffic import Line, encode_line
    from distill.engines.torch.hugging_face import encode, load_tokenizer, real_tokens
    from distill.engines.torch.hugging_face import load_config as load

    read_tokenizers(world, found)
    config = load(str(world.target))

    def whole() -> None:
        tokenizer = load_tokenizer(str(world.model))
        encode(tokenizer, "def alpha(): é\n")
        real_tokens(config, tokenizer)
        with contextlib.suppress(ValueError):
            template = ChatTemplate(tokenizer, Chat()) if tokenizer.chat_template else None
            encode_line(Line(1, [{"role": "user", "content": "alpha"}], "beta", True), tokenizer, template)

    return [whole]


# ── GGUF ──


def gguf_files(world: World) -> Strategy:
    path = world.finished / "gguf" / "draft-f16.gguf"
    parts, head = fuzz_gguf.take_apart(path)
    built = fuzz_gguf.hostile(parts)
    return weighted((7, built), (2, edited_bytes(path.read_bytes(), head)), (1, st.binary(max_size=40)))


def read_gguf_heads(world: World, found: bytes) -> Readers:
    from distill.engines.loaded import context_of
    from distill.engines.pairs import VocabularyMetadata

    path = str(world.put("model.gguf", found))
    return [lambda: VocabularyMetadata.read(path), lambda: context_of(path)]


def read_imports(world: World, found: bytes) -> Readers:
    """Return the whole import: configuration, tokenizer, chat template and weights, written as a folder and loaded."""
    from distill.engines.torch.hugging_face import load_config, load_tokenizer
    from distill.gguf.importing import read_import, write_import

    path, out = world.put("model.gguf", found), world.place / "imported"

    def whole() -> None:
        shutil.rmtree(out, ignore_errors=True)
        write_import(read_import(path), out)
        load_config(str(out))
        load_tokenizer(str(out))

    return [whole]


def read_gguf(world: World, found: bytes) -> Readers:
    """Load a file as llama.cpp does: the vocabulary alone as for a prompt, then the model, a text and its bytes."""
    from distill.engines.llama_cpp.model import GgufModel, token_bytes_of
    from distill.engines.loaded import encode_prompt
    from distill.engines.tokenizer import FileTokenizer

    path = world.put("model.gguf", found)

    def decode() -> None:
        with GgufModel(path, context=32, batch=16, threads=1) as model:
            ids = model.file.tokenize("def alpha(beta): total")[:12] or [0]
            model.file.detokenize(ids)
            token_bytes_of(model)
            _ = FileTokenizer(model.file).ends
            model.extend(ids).argmax()
            model.rollback([1])
            model.extend(ids[:3]).full()

    return [lambda: encode_prompt(str(path), "def alpha"), decode]


# ── Teacher store and checkpoints ──


SHARD = "shard-00001.safetensors"


def shards(world: World) -> Strategy:
    manifest = world.json("runs/tiny/teacher/train/manifest.json")
    edited = st.one_of(*safetensors(world.finished / "teacher" / "train" / SHARD))
    return st.one_of(st.tuples(st.just("manifest.json"), Tree(manifest).files()), st.tuples(st.just(SHARD), edited))


def read_shards(world: World, found: tuple[str, bytes]) -> Readers:
    """Read a changed file, whose stage has recorded another checksum."""
    import torch

    from distill.teacher.store import TeacherStore, require_fit

    name, data = found
    run = world.run
    for other in ("manifest.json", SHARD):
        restored(world, f"teacher/train/{other}")
    run.path("teacher", "train", name).write_bytes(data)

    def store() -> None:
        opened = TeacherStore(run)
        require_fit(opened.manifest, world.recipe)
        every = torch.arange(opened.blocks)
        teacher = opened.read(every).distributions(torch.device("cpu"))
        teacher.chunk(slice(0, 4), 1.0)

    return [store]


def learner() -> tuple[Any, Any]:
    """Return a learner of 20 parameters and its optimizer after a step."""
    import torch

    module = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return module, optimizer


def checkpoint_files(world: World) -> Strategy:
    from distill.training.saved import save_checkpoint

    run = Run(world.place / "learnt", world.recipe)
    save_checkpoint(run, 2, *learner(), state={"best": None, "sparsity": None})
    folder = run.path("checkpoints", "step-000002")
    weights = (folder / "model.pt").read_bytes()
    files = st.one_of(
        st.tuples(st.just("model.pt"), edited_bytes(weights)),
        st.tuples(st.just("optimizer.pt"), edited_bytes((folder / "optimizer.pt").read_bytes())),
        st.tuples(st.just("digests.json"), Tree(json.loads((folder / "digests.json").read_text())).files()),
        st.tuples(st.just("state.json"), Tree(json.loads((folder / "state.json").read_text())).files()),
        st.tuples(st.sampled_from(["../step-x/state.json", "../step-/a", "../step-9/state.json"]), st.just(b"{}")),
    )
    return st.tuples(files, st.booleans())


def read_checkpoints(world: World, found: tuple[tuple[str, bytes], bool]) -> Readers:
    from distill.training.saved import load_checkpoint, newest_checkpoint, save_checkpoint

    (name, data), without = found
    run = Run(world.place / "learnt", world.recipe)
    shutil.rmtree(run.folder, ignore_errors=True)
    module, optimizer = learner()
    save_checkpoint(run, 2, module, optimizer, state={"best": None, "sparsity": None})
    path = run.path("checkpoints", "step-000002", name)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    if without:
        run.path("checkpoints", "step-000002", "digests.json").unlink()

    def newest() -> None:
        checkpoint = newest_checkpoint(run.path("checkpoints"))
        if checkpoint is not None:
            state = load_checkpoint(checkpoint, module, optimizer)
            state["step"] + 1

    return [newest]


# ── Grammars ──

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9, "pattern": "^[a-z]+$"},
        "count": {"type": "integer", "minimum": 0, "maximum": 10},
        "kind": {"enum": ["alpha", "beta", None]},
        "items": {"type": "array", "items": {"$ref": "#/$defs/leaf"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"leaf": {"anyOf": [{"type": "number"}, {"const": 3}, {"type": "boolean"}]}},
}
GBNF = 'root ::= expr ("," expr)* # list\nexpr ::= [a-z0-9_]+ | "(" expr? ")" | "\\x41\\u00e9" . {2,3}\n'
LARK = 'start: item ("," item)*\nitem: NAME | NUMBER\nNAME: /[a-z]+/\nNUMBER: /[0-9]{1,4}/\n'
REGEX = r"(alpha|beta)+ [0-9]{2,4}(\.[a-f]+)?\s*"
PIECES = [
    *("(", ")", "((" * 2000, "[", "]", "{", "}", "{1,99999}", "{999999999}", "*", "+", "?", "|", "\\", "\\p{L}", "."),
    *("\\x", "\\UFFFFFFFF", "\\ud800", "^", "$", "::=", "root", '"', "/", "(?i)", "(?=a)", "\\1", "a" * 3000),
    *("\n", "#"),
    *("%import x", "<[1]>", "&", "~", "\0", "é", "(a*)*" * 20, "[^]", "[z-a]", "root ::= root\n", "start: start\n"),
]


def grammars(world: World) -> Strategy:
    parts = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8).map("".join)

    def near(text: str) -> Strategy:
        whole = edited_bytes(text.encode()).map(lambda found: found.decode("utf-8", "replace"))
        mixed = st.builds(lambda at, part: text[: at % len(text)] + part + text[at % len(text) :], fractions, parts)
        return st.one_of(whole, mixed, parts)

    schemas = Tree(SCHEMA).files().map(lambda found: found.decode("utf-8", "replace"))
    return st.one_of(
        st.tuples(st.just("json"), schemas),
        st.tuples(st.just("gbnf"), near(GBNF)),
        st.tuples(st.just("lark"), near(LARK)),
        st.tuples(st.just("regex"), near(REGEX)),
    )


def read_grammar(world: World, found: tuple[str, str]) -> Readers:
    from distill.decoding.grammar import constraint

    kind, text = found

    def steps() -> None:
        rules = constraint(kind, text, world.tokens)
        state = rules.root
        for _ in range(4):
            mask = state.mask(len(world.tokens.bytes_of))
            state = rules.next(state, int(mask.argmax()))
        rules.satisfied([1, 2])

    return [steps]


# ── Texts ──


NAMES = ["a.txt", "b/c.txt", "é.txt", "x" * 200, "-", "\n", "d/e/f/g", ".hidden", "\udcff\udcfe"]
NAMES += ["link", "loop", "folder"]


def text_folders(world: World) -> Strategy:
    return st.dictionaries(st.sampled_from(NAMES), st.binary(max_size=30) | texts, max_size=4)


def read_text_folder(world: World, found: dict[str, bytes | str]) -> Readers:
    from distill.cli.shared import read_texts
    from distill.data.sources import read_documents

    folder = world.place / "texts"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in found.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name in ("link", "loop"):
            path.symlink_to("loop" if name == "loop" else "missing")
        elif name == "folder":
            path.mkdir()
        else:
            path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8", "surrogatepass"))
    corpus = Corpus(sources=(Source(kind="tree", path=str(folder), pattern="**/*", split="test"),))
    readers: Readers = [lambda: read_texts([folder]), lambda: read_documents(corpus, ("test",))]
    return [*readers, *(partial(read_texts, [folder / name]) for name in found)]


# ── Command lines ──

GIVEN = [
    *("model", "runs", "tiny", "whole.yaml", "text.txt", "model.gguf", "out", "missing", "missing.yaml", "1", "3,2,1"),
    *("name=other", "train.steps=3", "train.steps=x", "greedy", "token", "draft", "lookup", "tree"),
    *("eval", "json", "md"),
    *("-", "--", "", "1e400", "0.5", "64,512", ".", "curve.json", "org/name", "f16", "expected-value", "é"),
]


USUAL = {  # valid values of arguments and options. Others get 3.
    **{"RECIPE": "whole.yaml", "RUN": "tiny", "MODEL": "model", "DONOR": "model", "TARGET": "model", "OUT": "out"},
    **{"RECIPE [a.b=c]... | TARGET [DRAFT]": "model model", "RECIPE [a.b=c]... | TARGET DRAFT": "whole.yaml"},
    **{"[RUN | TARGET [DRAFT]]": "model model", "[RUN | TARGET DRAFT...]": "tiny"},
    **{"PROMPT [RUN | TARGET [DRAFT]]": "text model model", "--target": "model", "--text": "text.txt"},
    **{"--runs": "runs", "--output": "json", "-o": "csv", "--until": "eval", "--redo": "eval"},
    **{"--acceptance": "0.9,0.5", "--outtype": "f16", "--depths": "64", "--prompts": "text.txt"},
    **{"--configuration": "drafter=lookup,length=3", "-C": "rule=p_min", "--sampler": "temperature=1,top_k=3"},
    **{"--pytorch": "static=true", "--llama": "ub=8", "--grammar": "text.txt", "--p-min": "0.5"},
}


def command_lines(world: World) -> Strategy:
    from typer.main import get_command

    from distill.cli.app import app

    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    plain = st.one_of(
        st.sampled_from(GIVEN), st.sampled_from(GIVEN), st.integers(-5, 2**65).map(str), st.floats().map(str), texts
    ).map(harmless)

    @st.composite
    def line(draw: Callable[..., Any]) -> list[str]:
        name = draw(st.sampled_from(sorted(commands)))
        found = [name]
        parameters = commands[name].params
        arguments = [one for one in parameters if one.param_type_name == "argument"]
        options = [one for one in parameters if one.param_type_name == "option"]
        for argument in arguments:
            if not argument.required and draw(st.booleans()):
                break
            given = USUAL.get(argument.metavar or "", "text")
            if draw(st.integers(0, 19)):
                found += [draw(weighted((3, st.just(word)), (1, plain))) for word in given.split()]
        for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2, 4])) if options else 0):
            option = draw(st.sampled_from(options))
            named = draw(st.sampled_from(option.opts + option.secondary_opts))
            found.append(named)
            if not option.is_flag or draw(st.integers(0, 19)) == 0:
                found.append(draw(weighted((2, st.just(USUAL.get(named, "3"))), (1, plain))))
        if draw(st.integers(0, 9)) == 0:
            found.insert(draw(st.integers(0, len(found))), draw(plain))
        return found

    return st.tuples(line(), st.binary(max_size=20))


def harmless(text: str) -> str:
    """Return an argument as a shell can give it, without a path out of the working directory."""
    text = text.replace("\0", "").replace("..", ".")[:5000]
    return text if not text.startswith(("/", "~")) or text == "/dev/null" else f"x{text}"


class Wrong(Exception):
    """A command had an outcome that users must not meet."""


FOREIGN = ("Traceback", "bug in distill", "pydantic", "validation error", "Input should", "transformers.", "datasets.")


STOP = "stopped: here a model is loaded, or a run begins"  # The whole command line has been read at this point.


class Stopped(DistillError):
    """A command would load a model or start a run here."""


def stop(*_: Any, **__: Any) -> Any:
    raise Stopped(STOP)


def run_command(world: World, found: tuple[list[str], bytes]) -> Readers:
    """Run `distill …` in this process, up to the loading of a model or the start of a run."""
    from distill.cli.app import main

    arguments, given = found
    where = world.place / "cwd"
    if not (where / "runs" / "tiny" / "config.yaml").exists():
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        shutil.copytree(world.finished, where / "runs" / "tiny")
        (where / "model").symlink_to(world.target)
        (where / "model.gguf").symlink_to(world.finished / "gguf" / "draft-f16.gguf")
        (where / "whole.yaml").write_text(dump_recipe(world.recipe))
        (where / "text.txt").write_text("alpha beta " * 300)

    def run() -> None:
        out, err = io.StringIO(), io.StringIO()
        stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.chdir(where))
            for name in STOPPED:
                stack.enter_context(mock.patch(name, stop))
            stack.enter_context(mock.patch("distill.cli.app.end_process", lambda: None))  # It would end this process.
            stack.enter_context(mock.patch.multiple(sys, argv=["distill", *arguments], stdin=stdin))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            try:
                main()
            except SystemExit as ended:
                code = ended.code
        text = out.getvalue() + err.getvalue()
        text.encode()
        # `doctor` prints names of packages, among them pydantic.
        told = err.getvalue() if code == 0 and "doctor" in arguments else text
        foreign = [words for words in FOREIGN if words in told]
        unanswered = code == 130 and "[y/N]" in text  # The standard input ended before an answer.
        if not (code in (0, 2) or unanswered) or foreign:
            raise Wrong(f"exit status {code}, {foreign}: {text[-1500:]}")
        if code == 2 and not err.getvalue().strip():
            raise Wrong("exit status 2 without a message")
        if code == 2 and STOP not in text:
            raise DataError(err.getvalue())

    return [run]


STOPPED = [
    *("distill.engines.torch.hugging_face.load_weights", "distill.gguf.library.GgufFile.__init__"),
    *("distill.pipeline.running.run_pipeline", "distill.report.card.report"),
    "distill.surgery.vocabulary.write_folder",
]


KINDS = [
    Kind("recipes", 6, recipe_files, read_recipe),
    Kind("overrides", 5, overrides, read_overrides),
    Kind("corpora (jsonl, text)", 14, corpora, read_corpus),
    Kind("data records", 5, lambda world: fuzz_records.records(), read_data_records),
    Kind("served traffic", 14, traffic, read_traffic),
    Kind("chats", 5, lambda world: fuzz_chats.chats, partial(compared, fuzz_chats.fault_of_chat)),
    Kind(
        "conversations",
        5,
        lambda world: fuzz_conversations.inputs(),
        partial(compared, fuzz_conversations.fault_of_conversation),
    ),
    Kind("recorded requests", 5, lambda world: fuzz_chats.requests(), partial(compared, fuzz_chats.fault_of_request)),
    Kind("requests", 5, lambda world: fuzz_requests.requests(), read_served),
    Kind("records and results of a run", 8, records, read_record),
    Kind("safetensors", 7, weight_files, read_weights),
    Kind("tables of n-grams", 2, tables, read_tables),
    Kind("model folders", 1, whole_models, read_whole_model, most_seconds=20, batch=50),
    Kind("mixed weight files", 1, mixed_weights, read_mixed_weights, most_seconds=20, batch=100),
    Kind("config.json", 1.5, configurations, read_configuration, batch=100),
    Kind("tokenizer files", 3, tokenizer_files, read_tokenizers),
    Kind("tokenizers in transformers", 0.3, tokenizer_files, read_slow_tokenizers, batch=50),
    Kind("GGUF heads", 12, gguf_files, read_gguf_heads),
    Kind("GGUF imports", 1, gguf_files, read_imports, batch=100),
    Kind("GGUF in llama.cpp", 0.5, gguf_files, read_gguf, isolated=True, batch=50),
    Kind("teacher shards", 1, shards, read_shards, batch=100),
    Kind("checkpoints", 1, checkpoint_files, read_checkpoints, batch=100),
    Kind("grammars", 5, grammars, read_grammar),
    Kind("folders of texts", 5, text_folders, read_text_folder),
    Kind("command lines", 1.5, command_lines, run_command, batch=100),
]
