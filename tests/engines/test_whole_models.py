"""Models whose tensors are not those of config.json, names of models, and drafts of the target's own size."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_export import edit

from distill.engines.torch.hugging_face import check_weights, load_model
from distill.errors import DataError, RecipeError
from distill.recipe import load_recipe, resolve_model

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(world: Path, tmp_path: Path) -> Path:
    """A copy of the world's target that a test may damage."""
    return Path(shutil.copytree(world / "target", tmp_path / "model"))


def change_tensors(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def change_config(folder: Path, **values: Any) -> None:
    edit(folder / "config.json", **values)


def drop_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".layers.2." in name]:
        del tensors[name]


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a layer is missing": (lambda f: change_tensors(f, drop_layer), "missing in the weights: 12 tensors .*layers.2"),
    "another width": (lambda f: change_config(f, intermediate_size=96), "in the weights and .* by config.json"),
    "more layers": (lambda f: change_config(f, num_hidden_layers=4, layer_types=None), "missing in the weights: 12"),
    "an inconsistent config.json": (
        lambda f: change_config(f, num_hidden_layers=4),
        r"cannot load .*num_hidden_layers",
    ),
    "another type": (lambda f: change_config(f, model_type="llama"), "model_type is llama, .* of a Qwen2ForCausalLM"),
    "another class": (
        lambda f: change_config(f, model_type="llama", architectures=["LlamaForCausalLM"]),
        "no place in its layers",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_models_that_are_not_whole_are_refused(folder: Path, fault: str, capfd: pytest.CaptureFixture[str]) -> None:
    damage, words = FAULTS[fault]
    damage(folder)
    for use in (lambda: load_model(str(folder), "float32", CPU), lambda: check_weights(str(folder))):
        with pytest.raises(DataError, match=words):
            use()
    assert "UNEXPECTED" not in capfd.readouterr().err, "transformers' own report"


def test_whole_models_pass(world: Path) -> None:
    """Tied heads are legitimately missing; test_mixed_weights.py has those that are stored."""
    assert "all 38 have the names and shapes" in check_weights(str(world / "target"))
    assert "lm_head.weight" not in load_file(world / "target" / "model.safetensors")
    load_model(str(world / "target"), "float32", CPU)


def test_names_without_the_prefix_of_the_model(folder: Path) -> None:
    def rename(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    before = load_model(str(folder), "float32", CPU).state_dict()
    change_tensors(folder, rename)
    assert "names and shapes" in check_weights(str(folder))
    after = load_model(str(folder), "float32", CPU).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_extra_tensors_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change_tensors(folder, lambda tensors: tensors.update({"visual.merger.weight": torch.zeros(2)}))
    load_model(str(folder), "float32", CPU)
    assert "warning" in (said := capsys.readouterr().err) and "1 tensor (visual.merger.weight)" in said


def test_headers_prove_nothing_about_quantised_weights(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "not checked before they are loaded" in check_weights(str(folder))


@pytest.mark.parametrize("command", ["check", "train"])
def test_commands_refuse_before_the_first_stage(
    world: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    change_tensors(folder, drop_layer)
    runs = ["--runs", str(tmp_path / "runs")] if command == "train" else []
    assert tiny.call(command, world / "recipe.yaml", f"target.model={folder}", *runs) == 2
    assert "missing in the weights" in capsys.readouterr().err and not (tmp_path / "runs").exists()
    assert tiny.call("check", "--target", world / "target", "--draft", folder) == 2
    assert "missing in the weights" in capsys.readouterr().err


# ── names ──


def test_an_existing_folder_wins_over_a_hub_name(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], no_network: None
) -> None:
    assert resolve_model("target", world) == str((world / "target").resolve())
    assert resolve_model("Qwen/Some", world) == "Qwen/Some"
    assert load_recipe(world / "recipe.yaml", ["target.model=target"]).target.model == str((world / "target").resolve())
    assert load_recipe(world / "recipe.yaml").cut.donor == "target", "the word, although a folder is called so"
    monkeypatch.chdir(world)
    assert tiny.call("check", "--target", "target", "--draft", "target") == 0
    assert f"tensors of {(world / 'target').resolve()}: all" in capsys.readouterr().out


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets and look-ups of addresses raise an error that no library catches."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "connect_ex", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def test_offline_opens_no_connection(
    world: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], no_network: None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    name = "someone/nothing"
    assert tiny.call("check", "--offline", "--target", world / "target", "--draft", name) == 0
    assert f"not checked: model {name} (--offline)" in capsys.readouterr().out
    assert tiny.call("check", "--offline", world / "recipe.yaml", f"target.model={name}") == 0
    assert f"not checked: model {name} (--offline)" in capsys.readouterr().out
    assert tiny.call("check", "--offline", world / "recipe.yaml") == 0
    assert "check passed" in capsys.readouterr().out


# ── size ──


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (["cut={}"], True),
        (["cut={}", "cut.allow_full_size=true"], False),
        (["cut={}", "train.sparsity={mlp_width: 64}", "train.steps=50"], False),
        (["cut={drop_layers: '1'}"], False),
        (["cut={mlp_width: 128}"], True),
    ],
)
def test_a_draft_of_the_size_of_its_target(world: Path, more: list[str], refused: bool) -> None:
    from distill.pipeline.preflight import preflight

    recipe = load_recipe(world / "recipe.yaml", more)
    if not refused:
        preflight(recipe)
        return
    with pytest.raises(RecipeError, match="costs as much as its target") as raised:
        preflight(recipe)
    assert raised.value.hint is not None and "cut.allow_full_size" in raised.value.hint


# ── artifacts ──


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("answers/train-00001.jsonl", "teacher"),
        ("corpus/prompts-test.jsonl", "speedup"),
        ("cut/model.safetensors", "train"),
        ("draft/model.safetensors", "eval"),
        ("draft/model.safetensors", "generate"),
        ("draft/model.safetensors", "export-gguf"),
    ],
)
def test_a_flipped_bit_is_found(
    world: Path, copied: Path, capsys: pytest.CaptureFixture[str], name: str, stage: str
) -> None:
    flip(copied / name)
    if stage == "generate":
        code = tiny.call("generate", "def", "--run", copied, "--tokens", 2)
    elif stage == "export-gguf":
        code = tiny.call("export-gguf", copied, "--outtype", "f16")
    else:
        code = tiny.call("train", world / "recipe.yaml", "--runs", copied.parent, "--redo", stage, "--until", stage)
    assert code == 2
    said = capsys.readouterr().err
    assert f"{name} is damaged" in said and "delete it" in said


def test_a_flipped_bit_in_a_checkpoint_is_found(copied: Path) -> None:
    from distill.training.saved import load_checkpoint

    path = copied / "checkpoints" / "step-000008"
    flip(path / "optimizer.pt")
    with pytest.raises(DataError, match=r"optimizer.pt has not the checksum"):
        load_checkpoint(path, torch.nn.Linear(1, 1), None)
