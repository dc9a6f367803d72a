"""Files that scripts/fuzz/fuzz.py found to break a reader: one message each, in our words, for every cause."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from distill.decoding import grammar
from distill.engines.loaded import context_of
from distill.engines.pairs import VocabularyMetadata
from distill.engines.torch.hugging_face import load_config, load_model, load_tokenizer, read_kept
from distill.errors import DataError
from distill.files import parse_json, read_json, read_object, read_result
from distill.folders import pin_tokenizer, stored_tensors, weight_files
from distill.gguf.fields import read_shape
from distill.gguf.library import GgufFile
from distill.gguf.tokenizer import read_tokenizer
from distill.measuring.evaluation_results import EvaluationReport, evaluation_blocks
from distill.pipeline.running import plan_refresh
from distill.recipe import load_recipe
from distill.report.card import gather
from distill.run import Run
from distill.surgery.results import read_changes
from distill.surgery.vocabulary import check_transplant
from distill.tables import document
from distill.teacher.store import read_manifest
from distill.training.saved import checkpoints, load_checkpoint, training_steps
from distill.vocabulary.vocabulary import Vocabulary, added_around, open_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def model(world: Path, tmp_path: Path) -> Path:
    """A copy of the target's folder that a test may change."""
    return Path(shutil.copytree(world / "target", tmp_path / "model"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# ── JSON ──


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\xff", r"not UTF-8 \(byte 1\)"),
        (b'{"a":\n"b": }', r"not JSON \(line 2, character 4"),
        (b'"\\ud800"', "lone surrogate"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "too many digits"),
        (str(2**63).encode(), "too many digits"),
    ],
)
def test_json(tmp_path: Path, raw: bytes, words: str) -> None:
    (tmp_path / "a.json").write_bytes(raw)
    with pytest.raises(DataError, match=words):
        read_json(tmp_path / "a.json")


def test_large_numbers_of_tokenizers_stay(tmp_path: Path) -> None:
    """model_max_length is 10^30 in many tokenizer_config.json."""
    (tmp_path / "a.json").write_text('{"model_max_length": 1000000000000000019884624838656}')
    assert read_object(tmp_path / "a.json")["model_max_length"] > 10**29
    assert parse_json(b"[9223372036854775807]", 2**63 - 1) == [2**63 - 1]


# ── safetensors ──


def header(entries: Any, length: int | None = None) -> bytes:
    text = json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    "data",
    [
        header(3),
        header([]),
        header({"a": 3}),
        header({"a": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": ["0", 8]}}),
        header({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}),
        header({"a.weight": {"dtype": "I8", "shape": [8], "data_offsets": [0, 8]}}),
        header({}, 2**62),
        (20_000).to_bytes(8, "little") + b"[" * 20_000,
        b"",
    ],
)
def test_safetensors(model: Path, data: bytes) -> None:
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(DataError, match=r"model\.safetensors"):
        stored_tensors(model, tied=False)


@pytest.mark.parametrize("names", [3, {"a": 3}, {"a": ["b"]}, {"a": "../x"}, {"a": ""}, {"a": "b\0"}, {}, None])
def test_index_of_weights(model: Path, names: Any) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(DataError, match=r"index\.json is damaged"):
        weight_files(model)


# ── config.json and tokenizers ──


CONFIG, TOKENIZER, SETTINGS = "config.json", "tokenizer.json", "tokenizer_config.json"


def damaged_models() -> Iterator[tuple[str, dict[str, Any], Callable[[Path], object], str]]:
    """A file of a model folder, values that it cannot have, a reader that refuses them, and its words."""
    for key, value in (
        ("vocab_size", 10**12),
        ("num_hidden_layers", 10**9),
        ("hidden_size", -1),
        ("architectures", 3),
        ("text_config", []),
        ("rope_parameters", ["a"]),
    ):
        yield CONFIG, {key: value}, lambda folder: load_config(str(folder)), key
    yield CONFIG, {"model_type": None}, lambda folder: load_config(str(folder)), "cannot load .* has model type `None`"
    for key in ("rms_norm_eps", "rope_theta"):
        for number in ([], "x", True, 10**400, -1):
            yield CONFIG, {"rope_parameters": None, key: number}, read_shape, key
    yield CONFIG, {"text_config": {}}, lambda folder: context_of(str(folder)), "text_config does not belong to a qwen2"
    unsized = {"intermediate_size": None}
    yield CONFIG, unsized, lambda folder: check_transplant(folder, folder), "intermediate_size must be an integer"
    # transformers makes tensors of those sizes first, gigabytes for a small file.
    for sizes in ({"vocab_size": 2**22, "hidden_size": 2**18}, {"intermediate_size": 2**20}):
        yield CONFIG, sizes, lambda folder: load_model(str(folder), "float32", CPU), "cannot be in weight files of"
    for key, content in (
        ("model", []),
        ("model", {"type": "BPE", "vocab": {"a": "0"}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [3]}),
        ("added_tokens", [{"id": 1}]),
        ("added_tokens", {"a": 1}),
    ):
        yield TOKENIZER, {key: content}, Vocabulary.read, r"tokenizer\.json is damaged"
    read = partial(read_tokenizer, vocabulary=400)
    # tokenizers panics over some tables, or ends the process for want of memory.
    table = {"type": "Sequence", "normalizers": [{"type": "Precompiled", "precompiled_charsmap": "AAAA"}]}
    for reader in (read, Vocabulary.read, lambda folder: load_tokenizer(str(folder))):
        yield TOKENIZER, {"normalizer": table}, reader, r"tokenizer\.json: a table of replacements"
    # tokenizers reads a part that is written as a list.
    yield TOKENIZER, {"normalizer": ["NFC"]}, read, r"\.json is damaged: normalizer must be an object, got list"
    steps = {"type": "Sequence", "pretokenizers": [["Digits", 1]]}
    yield TOKENIZER, {"normalizer": None, "pre_tokenizer": steps}, read, r"tokenizer\.json"
    for key, setting in (
        ("added_tokens_decoder", []),
        ("added_tokens_decoder", {"x": {"content": "a"}}),
        ("tokenizer_class", 3),
        ("chat_template", [3]),
        ("chat_template", [{"name": "default"}]),
    ):
        for reader in (Vocabulary.read, pin_tokenizer, lambda folder: VocabularyMetadata.read(str(folder))):
            yield SETTINGS, {key: setting}, reader, f"{key} has a wrong type"
    beyond = {"added_tokens_decoder": {"9999999": {"content": "x"}}}
    yield SETTINGS, beyond, Vocabulary.read, "have ids from 0 to 9999999"
    yield SETTINGS, {"model_max_length": "many"}, lambda folder: load_tokenizer(str(folder)), "model_max_length must be"


@pytest.mark.parametrize(("name", "values", "read", "words"), list(damaged_models()))
def test_model_folders(
    model: Path, name: str, values: dict[str, Any], read: Callable[[Path], object], words: str
) -> None:
    edit(model / name, **values)
    with pytest.raises(DataError, match=words):
        read(model)


def test_padding_to_a_length_takes_no_memory(model: Path) -> None:
    """tokenizers ends the process where it cannot allocate."""
    padding = {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    edit(model / "tokenizer.json", padding={**padding, "pad_type_id": 0, "pad_token": "x"})
    assert added_around(open_tokenizer(model / "tokenizer.json")) == ([], [])


def test_transformers_words_stay_inside(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("[]")
    with pytest.raises(DataError) as caught:
        load_tokenizer(str(model))
    assert "object has no" not in str(caught.value) and "NoneType" not in str(caught.value)


def test_a_tokenizer_that_multiplies_text_is_refused(tmp_path: Path) -> None:
    """Every ByteLevel step doubles the bytes of what is no ASCII: 200 of them end the process."""
    content = json.loads((tiny.ROOT / "data" / "demo-target" / "tokenizer.json").read_text())
    step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [step] * 200}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="maps bytes more than"):
        read_tokenizer(tmp_path, 10_000)
    content["pre_tokenizer"]["pretokenizers"] = [step] * 2
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="has no pre-tokenizer"):
        read_tokenizer(tmp_path, 10_000)


# ── GGUF ──


def with_number(path: Path, key: str, number: int) -> None:
    """Give a key of a GGUF file another number of four bytes; a key that is not there is put in front."""
    data, name = bytearray(path.read_bytes()), struct.pack("<Q", len(key)) + key.encode()
    if name not in data:
        entry = name + struct.pack("<II", 4, number)
        filler = struct.pack("<Q1sIQ", 1, b"x", 8, 0)  # a text that keeps the data aligned
        filler = filler[:-8] + struct.pack("<Q", -len(entry + filler) % 32) + b" " * (-len(entry + filler) % 32)
        data[16:24] = struct.pack("<Q", struct.unpack("<Q", data[16:24])[0] + 2)
        data[24:24] = entry + filler
        path.write_bytes(data)
        return
    at = data.index(name) + len(name) + 4
    data[at : at + 4] = struct.pack("<I", number)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("qwen2.block_count", 2**32 - 1),
        ("qwen2.rope.dimension_count", 2**31 - 1),
        ("qwen2.attention.head_count", 0x670000B7),
        ("qwen2.attention.head_count", 8),
        ("qwen2.attention.value_length", 8),
        ("qwen2.attention.head_count_kv", 3),
        ("tokenizer.ggml.eos_token_id", 100_000),
    ],
)
def test_numbers_on_which_llama_cpp_aborts(copied: Path, key: str, number: int) -> None:
    path = copied / "gguf" / "draft-f16.gguf"
    with_number(path, key, number)
    with pytest.raises(DataError, match=r"draft-f16\.gguf"):
        GgufFile(path)


def test_an_architecture_that_the_library_does_not_know(copied: Path) -> None:
    path = copied / "gguf" / "draft-f16.gguf"
    path.write_bytes(path.read_bytes().replace(b"qwen2", b"qwen9"))
    with pytest.raises(DataError, match=r"'qwen9', is unknown to the installed llama-cpp-python \d") as refused:
        GgufFile(path)
    assert "pip install -U llama-cpp-python" in str(refused.value.hint)


def test_an_embedding_without_lengths(copied: Path) -> None:
    path = copied / "gguf" / "draft-f16.gguf"
    data = bytearray(path.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight")
    data[at : at + 20] = struct.pack("<I", 0)
    path.write_bytes(data + bytes(64))
    with pytest.raises(DataError, match="embeds none"):
        VocabularyMetadata.read(str(path))


# ── artifacts of a run ──


@pytest.mark.parametrize(
    ("read", "content"),
    [
        *((lambda path: read_changes(path.parent), content) for content in ([], {"changes": 3}, "", "{")),
        *((lambda path: read_kept(path.parent), content) for content in ([], "{")),
        *(
            (lambda path: read_kept(path.parent), {"kept": kept, "vocabulary": size})
            for kept, size in (([0.5], 9), (["a"], 9), ([1], 1e999), ([3, 2], 9), ([], 9))
        ),
    ],
)
def test_artifacts(tmp_path: Path, read: Any, content: Any) -> None:
    for name in ("a.json", "surgery.json", "kept_tokens.json"):
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match=r"(a|surgery|kept_tokens)\.json"):
        read(tmp_path / "a.json")


def test_manifest_of_a_teacher(copied: Path, world: Path) -> None:
    edit(copied / "teacher" / "train" / "manifest.json", shard_blocks=[])
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        read_manifest(Run(copied, load_recipe(world / "recipe.yaml")))


@pytest.mark.parametrize("key", ["generation", "run", "files", "traffic"])
def test_parent_of_a_refreshed_run(copied: Path, world: Path, key: str) -> None:
    parent = {"generation": 1, "run": "a", "digest": "0", "files": {}, "traffic": None}
    (copied / "parent.json").write_text(json.dumps({**parent, key: 3.5}))
    run = Run(copied, load_recipe(world / "recipe.yaml"))
    with pytest.raises(DataError, match=r"parent\.json is damaged"):
        run.parent()


def test_a_run_that_never_started_has_a_report(copied: Path, world: Path) -> None:
    (copied / "provenance.json").write_text("[]")
    assert gather(load_recipe(world / "recipe.yaml"), Run(copied, load_recipe(world / "recipe.yaml"))).command


def test_a_record_with_another_pin(copied: Path, world: Path, tmp_path: Path) -> None:
    recipe = load_recipe(world / "recipe.yaml")
    served = recipe.answers.model_copy(update={"traffic": str(tmp_path / "served.jsonl")})
    path = copied / "stages" / "answers.json"
    edit(path, inputs={"traffic (content)": {"path": 3}})
    with pytest.raises(DataError, match=r"answers\.json is damaged"):
        plan_refresh(recipe.model_copy(update={"answers": served}), Run(copied, recipe))


def test_checkpoints(copied: Path) -> None:
    folder = copied / "checkpoints"
    for name in ("step-", "step-x", "step-9"):
        (folder / name).mkdir()
    assert [path.name for path in checkpoints(folder)] == ["step-000006", "step-000008"]
    (folder / "step-000008" / "digests.json").write_text('{"../../x": "0"}')
    module = torch.nn.Linear(2, 2)
    with pytest.raises(DataError, match=r"checkpoint .* is damaged"):
        load_checkpoint(folder / "step-000008", module, torch.optim.AdamW(module.parameters()))


# ── grammars ──


@pytest.mark.parametrize("escape", ["\\UFFFFFFFF", "\\ud800"])
def test_characters_that_do_not_exist(escape: str) -> None:
    with pytest.raises(DataError, match="names a character that does not exist"):
        grammar.lark(f'root ::= "{escape}"')


def test_metrics_without_a_step_are_left_out() -> None:
    lines = [{"stage": "train", "loss": 1.0}, {"stage": "train", "loss": 2.0, "step": []}]
    assert [one.loss for one in training_steps([*lines, {"stage": "train", "loss": 3.0, "step": 1}])] == [3.0]


def test_figures_that_an_evaluation_lacks(copied: Path) -> None:
    whole = json.loads((copied / "eval.json").read_text())
    without = {**whole, "positions": {part: [] for part in whole["positions"]}}
    (copied / "eval.json").write_text(json.dumps(without))
    shown = document(evaluation_blocks(read_result(copied / "eval.json", EvaluationReport)))
    assert "conditional acceptance by draft position" in shown and "| after | 1 |" not in shown
    (copied / "eval.json").write_text(json.dumps({**whole, "domains": {part: {} for part in whole["domains"]}}))
    with pytest.raises(DataError, match="does not have the form that this version writes"):
        read_result(copied / "eval.json", EvaluationReport)
