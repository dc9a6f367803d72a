"""Folders whose files disagree about the model: one reader refuses them for every command, or all read the same."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import Capture, edit

from distill.engines.ends import target_ends
from distill.engines.loaded import context_of
from distill.engines.torch.hugging_face import (
    check_weights,
    describe_model,
    empty_model,
    load_config,
    load_model,
    load_tokenizer,
)
from distill.errors import DataError, PairError, RecipeError
from distill.gguf.fields import read_shape
from distill.gguf.writer import read_tensors
from distill.pipeline.preflight import check_decoding, check_stages, preflight
from distill.recipe import Cut, load_recipe, resolve_model
from distill.surgery.cutter import cut_folder
from distill.surgery.vocabulary import check_transplant

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], object]


@pytest.fixture
def folder(world: Path, tmp_path: Path) -> Path:
    """A copy of the world's target, in one file."""
    return Path(shutil.copytree(world / "target", tmp_path / "model"))


def loaded(reference: Path | str) -> Any:
    return load_model(str(reference), "float32", torch.device("cpu"))


def save(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path, {"format": "pt"})


def split(folder: Path, **entries: str) -> Tensors:
    """Write the tensors as two files with an index, and these entries of it; the tensors."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    places: dict[str, str] = {}
    for shard, half in zip(SHARDS, (names[::2], names[1::2]), strict=True):
        save(folder / shard, {name: tensors[name] for name in half})
        places |= dict.fromkeys(half, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places | entries}))
    return tensors


def change(path: Path, edited: Callable[[Tensors], object]) -> None:
    tensors = load_file(path)
    edited(tensors)
    save(path, tensors)


def single_beside_index(folder: Path) -> None:
    shutil.copyfile(folder / SINGLE, folder / "kept")
    split(folder)
    (folder / "kept").rename(folder / SINGLE)


def index_of_both(folder: Path) -> None:
    split(folder)
    shutil.copyfile(folder / SHARDS[0], folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE, "b": SHARDS[1]}}))


def moved(folder: Path, keep: bool = False) -> None:
    """A tensor in the other file than the index says, or, with another value, in both."""
    split(folder)
    first, second = load_file(folder / SHARDS[0]), load_file(folder / SHARDS[1])
    name = min(first)
    second[name] = first[name] + 1
    if not keep:
        del first[name]
    save(folder / SHARDS[0], first)
    save(folder / SHARDS[1], second)


def unnamed(folder: Path) -> None:
    split(folder)
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"].popitem()
    (folder / INDEX).write_text(json.dumps(content))


def own_head(folder: Path, move: float = 1.0, rows: slice = slice(None)) -> None:
    edit(folder / CONFIG, tie_word_embeddings=True)
    change(folder / SINGLE, lambda tensors: tensors.update({HEAD: (tensors[EMBEDDING] + move)[rows].clone()}))


def adapter(folder: Path, alone: bool = False) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base", "peft_type": "LORA"}')
    save(folder / "adapter_model.safetensors", {"base_model.model.x.lora_A.weight": torch.zeros(1)})
    if alone:
        (folder / SINGLE).unlink()
        (folder / CONFIG).unlink()


def only_bin(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def drop_layer(folder: Path) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".layers.2." in name]:
            del tensors[name]

    change(folder / SINGLE, drop)


def stated(**values: Any) -> Damage:
    """Other values in config.json."""
    return lambda folder: edit(folder / CONFIG, **values)


ROPES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_scaling": {"type": "yarn", "factor": 4}}
REFUSED: dict[str, tuple[Damage, str]] = {
    "one file beside an index": (single_beside_index, rf"{SINGLE} and {INDEX}, which names {SHARDS[0]}"),
    "an index that names the one file and another": (index_of_both, rf"{SINGLE} and {INDEX}"),
    "a file of the index is missing": (lambda f: (split(f), (f / SHARDS[1]).unlink()), rf"missing, first {SHARDS[1]}"),
    "no index": (lambda f: (split(f), (f / INDEX).unlink()), rf"{SHARDS[0]} without {INDEX}"),
    "the index names a tensor that its file lacks": (
        lambda f: split(f, **{"model.norm.more": SHARDS[0]}),
        rf"places model.norm.more in {SHARDS[0]}",
    ),
    "a tensor in the other file": (moved, "which does not hold it"),
    "a tensor in both files": (lambda f: moved(f, keep=True), rf"is in {SHARDS[0]} and in {SHARDS[1]}"),
    "a tensor that the index does not name": (unnamed, rf"which {INDEX} does not name"),
    "a head of its own, although tied": (own_head, f"{HEAD} differs from {EMBEDDING}"),
    "a head of another shape": (lambda f: own_head(f, rows=slice(1, None)), f"{HEAD} differs from {EMBEDDING}"),
    "no head, although not tied": (stated(tie_word_embeddings=False), rf"missing.* {HEAD}|\({HEAD}\)"),
    "an adapter beside its base": (adapter, "holds an adapter .*someone/base"),
    "an adapter alone": (lambda f: adapter(f, alone=True), "holds an adapter .*someone/base"),
    "no safetensors": (only_bin, f"no {SINGLE}"),
    "another file by config.json": (stated(transformers_weights="other"), "transformers_weights names 'other"),
    "two rotary embeddings": (stated(**ROPES), "rope_parameters and rope_scaling differ: "),
    "a layer is missing": (drop_layer, r"missing in the weights: 12 tensors .*layers\.2|12 .* missing, first .*rs\.2"),
    "another width": (stated(intermediate_size=96), r"\.mlp\.\w+\.weight (is|has shape) .* config.json"),
    "no number of heads": (stated(num_key_value_heads=None), r"names no num_key_value_heads|k_proj.* config.json"),
    "a null": (stated(rms_norm_eps=None), r"than the libraries expect: rms_norm_eps|rms_norm_eps is missing"),
    "more layers": (stated(num_hidden_layers=4, layer_types=None), "missing in the weights: 12|12 tensors are missing"),
    "an inconsistent config.json": (stated(num_hidden_layers=4), r"cannot load .*num_hidden_layers|12 tensors are"),
    "norms of another type": (stated(model_type="qwen3", architectures=["Qwen3ForCausalLM"]), r"missing.*\bq_norm\b"),
    "another type": (stated(model_type="llama"), "model_type is llama, .* of a Qwen2ForCausalLM"),
    "another class": (stated(model_type="llama", architectures=["LlamaForCausalLM"]), "no place in its layers"),
}
# A llama has a place in GGUF for the biases of a qwen2, and the command finds the others' refusal first.
NOT_EXPORT = ("an adapter alone", "a null", "another type", "another class")


def readers(world: Path, folder: Path) -> dict[str, Callable[[], Any]]:
    """What loading, checking, exporting and cutting call."""
    return {
        "load": lambda: loaded(folder),
        "check": lambda: check_weights(str(folder)),
        "export": lambda: read_tensors(folder, read_shape(folder)),
        "transplant": lambda: check_transplant(folder, world / "target"),
    }


@pytest.mark.parametrize("fault", REFUSED)
def test_files_that_disagree_are_refused_by_every_reader(world: Path, folder: Path, fault: str, capfd: Capture) -> None:
    damage, words = REFUSED[fault]
    damage(folder)
    for name, reader in readers(world, folder).items():
        if name != "export" or fault not in NOT_EXPORT:
            with pytest.raises(DataError, match=words) as raised:
                reader()
            assert raised.value.hint, name
    assert "UNEXPECTED" not in capfd.readouterr().err, "transformers' own report"


def without_prefix(folder: Path) -> Tensors:
    tensors = load_file(folder / SINGLE)
    save(folder / SINGLE, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    return tensors


def one_file_of_an_index(folder: Path) -> Tensors:
    tensors = load_file(folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE)}))
    return tensors


def computed_buffer(folder: Path) -> Tensors:
    """Which an index may leave out."""
    tensors = split(folder)
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    change(folder / SHARDS[0], lambda found: found.update(buffer))
    return tensors


def stored_head(folder: Path) -> Tensors:
    own_head(folder, move=0.0)
    return load_file(folder / SINGLE)


def head_of_its_own(folder: Path) -> Tensors:
    own_head(folder)
    edit(folder / CONFIG, tie_word_embeddings=False)
    return load_file(folder / SINGLE)


def other_weights(folder: Path) -> Tensors:
    tensors = load_file(folder / SINGLE)
    torch.save({name: value + 1 for name, value in tensors.items()}, folder / "pytorch_model.bin")
    save(folder / "model.fp16.safetensors", {})
    return tensors


def extra_tensor(folder: Path) -> Tensors:
    tensors = load_file(folder / SINGLE)
    save(folder / SINGLE, tensors | {"visual.merger.weight": torch.zeros(2)})
    return tensors


# How a folder is written, and the readers that do not take it: GGUF has no place for what the others pass over.
WHOLE = {
    **dict.fromkeys((split, one_file_of_an_index, stored_head, head_of_its_own, other_weights), ()),
    **{without_prefix: ("export", "transplant"), computed_buffer: (), extra_tensor: ("export",)},
}


@pytest.mark.parametrize("written", WHOLE)
def test_every_reader_gives_the_same_tensors(
    world: Path, folder: Path, capsys: Capture, written: Callable[[Path], Tensors]
) -> None:
    expected, found = written(folder), readers(world, folder)
    state = found["load"]().state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert torch.equal(state[HEAD], state[EMBEDDING]) is (written is not head_of_its_own)
    assert "names and shapes" in str(found["check"]())
    if "export" not in WHOLE[written]:
        exported = {tensor.name: tensor for tensor in found["export"]()}
        for name, own in (("token_embd.weight", EMBEDDING), ("output.weight", HEAD)):
            if name in exported:
                assert (exported[name].read(0, 3) == expected[own][:3].float().numpy()).all()
        assert ("output.weight" in exported) is (written is head_of_its_own)
    if "transplant" not in WHOLE[written]:
        transplanted = found["transplant"]()
        for name, tensor in transplanted.tensors.items():
            assert name not in expected or torch.equal(tensor.read(), expected[name])
    said = capsys.readouterr().err
    not_read = f"the weights of {folder} are {SINGLE}; not read: model.fp16.safetensors, pytorch_model.bin"
    assert said.count("not read") == said.count(not_read) == (1 if written is other_weights else 0)
    assert ("1 tensor (visual.merger.weight)" in said) is (written is extra_tensor)


def test_a_model_of_the_hub_is_read_from_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **more: str(folder))
    model = loaded("someone/small")
    assert torch.equal(model.state_dict()[EMBEDDING], load_file(folder / SINGLE)[EMBEDDING])
    assert model.config.name_or_path == "someone/small"
    single_beside_index(folder)
    for reader in (loaded, check_weights):
        with pytest.raises(DataError, match=f"{SINGLE} and {INDEX}"):
            reader("someone/small")


@pytest.mark.parametrize(
    ("new", "old", "theta"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, None, None),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}, {"type": "linear", "factor": 2.0}, 1e6),
        ({"rope_type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}, 5e5),
        ({}, {"type": "linear", "factor": 2.0}, 1e6),
        (None, {"rope_type": "default", "rope_theta": 1e6}, None),
        (None, None, 123456.0),
    ],
)
def test_one_rotary_embedding_in_two_spellings(folder: Path, new: Any, old: Any, theta: float | None) -> None:
    """The export writes what transformers computes with."""
    edit(folder / CONFIG, rope_parameters=new, rope_scaling=old, rope_theta=theta)
    shape, rope = read_shape(folder), transformers.AutoConfig.from_pretrained(folder).rope_parameters
    assert shape.rope_theta == rope["rope_theta"] and shape.rope["rope_type"] == rope["rope_type"]
    assert shape.rope.get("factor") == rope.get("factor")


def test_headers_prove_nothing_about_quantised_weights(world: Path, folder: Path) -> None:
    """Of others they do; a tied head, which is not stored, is not missing."""
    assert "all 38 have the names and shapes" in check_weights(str(world / "target"))
    edit(folder / CONFIG, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert "not checked before they are loaded" in check_weights(str(folder))


def test_a_cut_is_compared_with_a_target_of_its_own_vocabulary(world: Path, tmp_path: Path) -> None:
    tiny.build_model(tmp_path / "other", vocabulary=300)
    texts = [tiny.document(number) for number in range(8)]
    with pytest.raises(PairError, match="does not fit the target"):
        cut_folder(str(world / "target"), tmp_path / "cut", Cut(layers=1), texts, str(tmp_path / "other"))
    assert not (tmp_path / "cut").exists()


def test_a_transplant_replaces_no_model(world: Path, folder: Path, capsys: Capture) -> None:
    before = tiny.contents(folder)
    assert "is not empty" in tiny.refused(capsys, "transplant", world / "target", world / "target", folder)
    assert tiny.contents(folder) == before


# ── what other files say ──


@pytest.mark.parametrize("stated", [7, [7, 9], [9]])
def test_generation_config_names_further_ends(folder: Path, stated: Any) -> None:
    """As transformers' own generate stops at them."""
    tokenizer = load_tokenizer(str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    before = target_ends(str(folder), tokenizer).ids
    edit(folder / "generation_config.json", eos_token_id=stated)
    further = stated if isinstance(stated, list) else [stated]
    assert target_ends(str(folder), tokenizer).ids == sorted({*before, *further})
    model = loaded(folder)
    assert model.generation_config.eos_token_id == stated


def test_a_damaged_end_is_refused(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(DataError, match="eos_token_id is '</s>'"):
        target_ends(str(folder), load_tokenizer(str(folder)))


def test_a_kind_of_layer_without_a_cache_is_refused_before_weights_are_read(world: Path, tmp_path: Path) -> None:
    config = transformers.Lfm2Config(vocab_size=61, num_hidden_layers=1, layer_types=["indexed_attention"])
    config.save_pretrained(tmp_path / "target")
    recipe = load_recipe(
        world / "recipe.yaml", [f"target.model={tmp_path / 'target'}", f"cut.donor={world / 'target'}"]
    )
    with pytest.raises(DataError, match="cannot be decoded here: it has layers of kind"):
        check_stages(recipe)


ODD = {
    "bloom": ({"n_layer": 1, "n_head": 2, "hidden_size": 16, "seq_length": 64}, 64, 64),
    "gpt2": ({"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 70}, 70, 64),
    "mpt": ({"n_layers": 1, "n_heads": 2, "d_model": 16, "max_seq_len": 80}, 80, 64),
    "opt": ({"hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 48, "word_embed_proj_dim": 16}, 2048, 48),
    "falcon": ({"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}, 2048, 64),
}


@pytest.mark.parametrize("kind", ODD)
def test_sizes_under_the_names_of_a_family(kind: str, tmp_path: Path) -> None:
    settings, context, mlp = ODD[kind]
    transformers.AutoConfig.for_model(kind, vocab_size=61, **settings).save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    sizes = describe_model("x", empty_model(config))
    assert (context_of(str(tmp_path)), config.max_position_embeddings, sizes.mlp) == (context, context, mlp)
    lines = check_decoding(str(tmp_path), config)
    alone = kind in ("bloom", "mpt", "falcon")
    assert len(lines) == alone and all(
        "writes answers one at a time (its attention is of its own" in line for line in lines
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mamba", "keeps its state in its own way"),
        ("rwkv", "keeps its state in its own way"),
        ("recurrent_gemma", "from a cache differ from those of the whole text"),
        ("openai-gpt", "differs from transformers' own forward pass with a growing cache"),
        ("doge", "cannot read several texts at once here"),
    ],
)
def test_targets_that_cannot_be_right_are_refused_before_their_weights_are_read(kind: str, words: str) -> None:
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "n_embd": 32}
    config = transformers.AutoConfig.for_model(kind, **sizes, max_position_embeddings=64)
    with pytest.raises(DataError, match=words):
        check_decoding("x", config)


def test_models_that_are_no_language_model_alone_are_refused(tmp_path: Path, capsys: Capture) -> None:
    transformers.Gemma3Config().save_pretrained(tmp_path / "composite")
    with pytest.raises(DataError, match="is a gemma3, whose language model is only one of its parts"):
        loaded(tmp_path / "composite")
    transformers.BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path / "bloom")
    assert "names no max_position_embeddings" in tiny.refused(capsys, "profile", tmp_path / "bloom")


# ── names ──


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets and look-ups of addresses raise an error that no library catches."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "create_connection")):
        monkeypatch.setattr(owner, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_an_existing_folder_wins_over_a_hub_name(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, no_network: None
) -> None:
    place = str((world / "target").resolve())
    assert resolve_model("target", world) == place and resolve_model("Qwen/Some", world) == "Qwen/Some"
    assert load_recipe(world / "recipe.yaml", ["target.model=target"]).target.model == place
    assert load_recipe(world / "recipe.yaml").cut.donor == "target", "the word, although a folder is called so"
    monkeypatch.chdir(world)
    assert f"tensors of {place}: all" in tiny.shown(capsys, "check", "target", "target")


def test_offline_opens_no_connection(
    world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture, no_network: None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    recipe, name = world / "recipe.yaml", "someone/nothing"
    for arguments in ((world / "target", name), (recipe, f"target.model={name}")):
        assert f"not checked: model {name} (--offline)" in tiny.shown(capsys, "check", "--offline", *arguments)
    assert "check passed" in tiny.shown(capsys, "check", "--offline", recipe)


# ── size ──


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (["cut={}"], True),
        (["cut={}", "cut.allow_full_size=true"], False),
        (["cut={}", "train.sparsity={mlp_width: 64}", "train.steps=50"], False),
        (["cut={layers: 1}"], False),
        (["cut={mlp_width: 128}"], True),
    ],
)
def test_a_draft_of_the_size_of_its_target(world: Path, more: list[str], refused: bool) -> None:
    recipe = load_recipe(world / "recipe.yaml", more)
    if not refused:
        preflight(recipe)
        return
    with pytest.raises(RecipeError, match="costs as much as its target") as raised:
        preflight(recipe)
    assert raised.value.hint is not None and "cut.allow_full_size" in raised.value.hint
