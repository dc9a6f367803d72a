"""Folders whose files disagree about the weights: one reader refuses them for every command, or all read the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_export import edit

from distill.engines.torch.hugging_face import check_weights, load_model
from distill.errors import DataError
from distill.gguf.fields import read_shape
from distill.gguf.writer import read_tensors
from distill.surgery.subtokens import check_transplant

pytestmark = pytest.mark.usefixtures("one_thread")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(world: Path, tmp_path: Path) -> Path:
    """A copy of the world's target, in one file."""
    return Path(shutil.copytree(world / "target", tmp_path / "model"))


def save(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path, {"format": "pt"})


def split(folder: Path, **entries: str) -> Tensors:
    """Write the tensors as two files with an index, and these entries of it; the tensors."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    halves = names[::2], names[1::2]
    places = {name: shard for shard, half in zip(SHARDS, halves, strict=True) for name in half}
    for shard, half in zip(SHARDS, halves, strict=True):
        save(folder / shard, {name: tensors[name] for name in half})
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


def moved(folder: Path) -> None:
    """A tensor in the other file than the index says."""
    split(folder)
    first, second = load_file(folder / SHARDS[0]), load_file(folder / SHARDS[1])
    second[EMBEDDING] = first.pop(EMBEDDING) if EMBEDDING in first else first.pop(min(first))
    save(folder / SHARDS[0], first), save(folder / SHARDS[1], second)


def doubled(folder: Path) -> None:
    split(folder)
    first = load_file(folder / SHARDS[0])
    name = min(first)
    change(folder / SHARDS[1], lambda tensors: tensors.update({name: first[name] + 1}))


def unnamed(folder: Path) -> None:
    split(folder)
    content = json.loads((folder / INDEX).read_text())
    content["weight_map"].popitem()
    (folder / INDEX).write_text(json.dumps(content))


def own_head(folder: Path, move: float = 1.0) -> None:
    edit(folder / "config.json", tie_word_embeddings=True)
    change(folder / SINGLE, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + move}))


def adapter(folder: Path, alone: bool = False) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base", "peft_type": "LORA"}')
    save(folder / "adapter_model.safetensors", {"base_model.model.x.lora_A.weight": torch.zeros(1)})
    if alone:
        (folder / SINGLE).unlink(), (folder / "config.json").unlink()


def only_bin(folder: Path) -> None:
    torch.save(load_file(folder / SINGLE), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def narrow(tensors: Tensors) -> None:
    name = next(name for name in tensors if name.endswith("layers.1.mlp.down_proj.weight"))
    tensors[name] = tensors[name][:, :-1].contiguous()


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "one file beside an index": (single_beside_index, rf"{SINGLE} beside {INDEX}, which names {SHARDS[0]}"),
    "an index that names the one file and another": (
        lambda f: (
            split(f),
            shutil.copyfile(f / SHARDS[0], f / SINGLE),
            (f / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE, "b": SHARDS[1]}})),
        ),
        rf"{SINGLE} beside {INDEX}",
    ),
    "a file of the index is missing": (lambda f: (split(f), (f / SHARDS[1]).unlink()), rf"missing, first {SHARDS[1]}"),
    "no index": (lambda f: (split(f), (f / INDEX).unlink()), rf"{SHARDS[0]} without {INDEX}"),
    "the index names a tensor that its file lacks": (
        lambda f: split(f, **{"model.norm.more": SHARDS[0]}),
        rf"places model.norm.more in {SHARDS[0]}",
    ),
    "a tensor in the other file": (moved, "which does not hold it"),
    "a tensor in both files": (doubled, rf"is in {SHARDS[0]} and in {SHARDS[1]}"),
    "a tensor that the index does not name": (unnamed, rf"which {INDEX} does not name"),
    "a head of its own, although tied": (own_head, f"{HEAD} differs from {EMBEDDING}"),
    "a head of another shape, although tied": (
        lambda f: (own_head(f), change(f / SINGLE, lambda t: t.update({HEAD: t[HEAD][1:].clone()}))),
        f"{HEAD} differs from {EMBEDDING}",
    ),
    "an adapter beside its base": (adapter, "holds an adapter .*someone/base"),
    "an adapter alone": (lambda f: adapter(f, alone=True), "holds an adapter .*someone/base"),
    "no safetensors": (only_bin, f"no {SINGLE}"),
    "another file by config.json": (
        lambda f: edit(f / "config.json", transformers_weights="other.safetensors"),
        "transformers_weights names 'other",
    ),
    "a tensor of another shape": (
        lambda f: change(f / SINGLE, narrow),
        r"down_proj.weight (is|has shape) .* by config.json",
    ),
    "two rotary embeddings": (
        lambda f: edit(
            f / "config.json",
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            rope_scaling={"type": "yarn", "factor": 4.0},
        ),
        "rope_parameters and rope_scaling differ: ",
    ),
}


def readers(world: Path, folder: Path) -> dict[str, Callable[[], object]]:
    """What loading, checking, exporting and cutting call."""
    return {
        "load": lambda: load_model(str(folder), "float32", torch.device("cpu")),
        "check": lambda: check_weights(str(folder)),
        "export": lambda: read_tensors(folder, read_shape(folder)),
        "transplant": lambda: check_transplant(folder, world / "target"),
    }


@pytest.mark.parametrize("fault", REFUSED)
def test_files_that_disagree_are_refused_by_every_reader(world: Path, folder: Path, fault: str) -> None:
    damage, words = REFUSED[fault]
    damage(folder)
    for name, reader in readers(world, folder).items():
        if name == "export" and not (folder / "config.json").exists():
            continue  # the command finds the folder through the others' check
        with pytest.raises(DataError, match=words) as raised:
            reader()
        assert raised.value.hint, name


def same_values(world: Path, folder: Path, expected: Tensors) -> None:
    """All readers give these tensors."""
    found = readers(world, folder)
    loaded: Any = found["load"]()
    state = loaded.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert "names and shapes" in str(found["check"]())
    exported: Any = found["export"]()
    names = {tensor.name: tensor for tensor in exported}
    rows = names["token_embd.weight"].read(0, 3)
    assert (rows == expected[EMBEDDING][:3].float().numpy()).all()
    transplanted: Any = found["transplant"]()
    assert all(torch.equal(tensor.read(), expected[name]) for name, tensor in transplanted.tensors.items())


def test_two_files_and_an_index(world: Path, folder: Path) -> None:
    same_values(world, folder, split(folder))


def test_an_index_of_the_one_file(world: Path, folder: Path) -> None:
    tensors = load_file(folder / SINGLE)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, SINGLE)}))
    same_values(world, folder, tensors)


def test_computed_buffers_may_be_missing_from_the_index(world: Path, folder: Path) -> None:
    tensors = split(folder)
    change(
        folder / SHARDS[0], lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    assert "names and shapes" in check_weights(str(folder))
    assert torch.equal(
        load_model(str(folder), "float32", torch.device("cpu")).state_dict()[EMBEDDING], tensors[EMBEDDING]
    )


def test_a_tied_head_may_be_stored(world: Path, folder: Path) -> None:
    own_head(folder, move=0.0)
    same_values(world, folder, load_file(folder / SINGLE))


def test_the_head_of_an_untied_model_is_its_own(folder: Path) -> None:
    own_head(folder)
    edit(folder / "config.json", tie_word_embeddings=False)
    stored, state = load_file(folder / SINGLE), load_model(str(folder), "float32", torch.device("cpu")).state_dict()
    assert torch.equal(state[HEAD], stored[HEAD]) and not torch.equal(state[HEAD], state[EMBEDDING])
    names = {tensor.name: tensor for tensor in read_tensors(folder, read_shape(folder))}
    assert (names["output.weight"].read(0, 2) == stored[HEAD][:2].float().numpy()).all()


def test_other_weights_in_the_folder_are_named(world: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(folder / SINGLE)
    torch.save({name: value + 1 for name, value in tensors.items()}, folder / "pytorch_model.bin")
    save(folder / "model.fp16.safetensors", {})
    same_values(world, folder, tensors)
    said = capsys.readouterr().err
    assert f"the weights of {folder} are {SINGLE}; not read: model.fp16.safetensors, pytorch_model.bin" in said
    assert said.count("not read") == 1


def test_a_model_of_the_hub_is_read_from_its_snapshot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **more: str(folder))
    cpu, stored = torch.device("cpu"), load_file(folder / SINGLE)
    model = load_model("someone/small", "float32", cpu)
    assert torch.equal(model.state_dict()[EMBEDDING], stored[EMBEDDING])
    assert model.config.name_or_path == "someone/small"
    single_beside_index(folder)
    for reader in (lambda: load_model("someone/small", "float32", cpu), lambda: check_weights("someone/small")):
        with pytest.raises(DataError, match=f"{SINGLE} beside {INDEX}"):
            reader()


@pytest.mark.parametrize(
    ("new", "old", "theta"),
    [
        ({"rope_type": "default", "rope_theta": 1e6}, None, None),
        ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}, {"type": "linear", "factor": 2.0}, 1e6),
        ({"rope_type": "linear", "factor": 2}, {"rope_type": "linear", "factor": 2.0}, 5e5),
        ({}, {"type": "linear", "factor": 2.0}, 1e6),
        (None, {"rope_type": "default", "rope_theta": 1e6}, None),
    ],
)
def test_one_rotary_embedding_in_two_spellings(folder: Path, new: Any, old: Any, theta: float | None) -> None:
    """The export writes what transformers computes with."""
    from transformers import AutoConfig

    edit(folder / "config.json", rope_parameters=new, rope_scaling=old, rope_theta=theta)
    shape, rope = read_shape(folder), AutoConfig.from_pretrained(folder).rope_parameters
    assert shape.rope_theta == rope["rope_theta"] and shape.rope["rope_type"] == rope["rope_type"]
    assert shape.rope.get("factor") == rope.get("factor")


@pytest.mark.parametrize("command", ["check", "eval", "export-gguf", "transplant", "cut", "train"])
def test_commands_refuse(
    world: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    single_beside_index(folder)
    argv = {
        "check": ["check", "--target", world / "target", "--draft", folder],
        "eval": ["eval", "--target", world / "target", "--draft", folder, "--text", world / "corpus" / "test", "--kl"],
        "export-gguf": ["export-gguf", folder, "--to", tmp_path / "out", "--outtype", "f16"],
        "transplant": ["transplant", folder, world / "target", tmp_path / "out"],
        "cut": ["cut", folder, tmp_path / "out", "--layers", 2, "--text", world / "corpus" / "test"],
        "train": ["train", world / "recipe.yaml", f"target.model={folder}", "--runs", tmp_path / "runs"],
    }[command]
    assert tiny.call(*argv) == 2
    assert f"{SINGLE} beside {INDEX}" in capsys.readouterr().err
