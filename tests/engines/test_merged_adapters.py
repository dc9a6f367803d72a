"""A PEFT adapter over a base is a model: the same as the folder that PEFT merges, to the bit, in every command."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file
from tiny import Capture, Patch, edit
from toys import tune

from distill.engines.server_commands import served_name
from distill.engines.torch.hugging_face import load_config, load_model, load_tokenizer, local_folder
from distill.errors import DataError
from distill.files import cache_folder, over, parts_of, reference_digest
from distill.planning import order
from distill.recipe import dump_recipe, load_recipe, resolve_model
from distill.tables import Interval

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def tuned(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A base, an adapter over it, and the folder of both merged by PEFT."""
    folder = tmp_path_factory.mktemp("tuned")
    base, adapter, merged = world / "target", folder / "adapter", folder / "merged"
    tune(base, adapter).save_pretrained(merged)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, merged / name)
    return base, adapter, merged


def test_it_is_the_merged_folder(tuned: tuple[Path, Path, Path], tmp_path: Path, capsys: Capture) -> None:
    """In each command that takes a model, however it is named, as target and as draft."""
    base, adapter, merged = tuned
    assert json.loads((adapter / SETTINGS).read_text())["base_model_name_or_path"] == str(base)
    prompts = ("--prompts", base.parent / "corpus" / "test", "--count", 4)
    drawn = ("--tokens", 24, "--temperature", 1.5)
    named = ([base, "--adapter", adapter], [adapter], [over(str(base), str(adapter))])
    expected = tiny.shown(capsys, "generate", "def alpha(", merged, "-C", "drafter=none", *drawn)
    assert expected != tiny.shown(capsys, "generate", "def alpha(", base, "-C", "drafter=none", *drawn)
    for words in named:
        found = tiny.shown(capsys, "generate", "def alpha(", *words, "-C", "drafter=none", *drawn)
        assert found == expected
        (folder,) = cache_folder("merged").glob(f"{adapter.name}-*")
        scratch = folder / f".model.safetensors.{2**22 + 1}.folder"  # of a process that was killed
        assert not scratch.exists(), "the next start removes it"
        (scratch / "model").mkdir(parents=True)
        os.utime(scratch, (0, 0))

    def divergence(*words: object) -> Any:
        report = json.loads(tiny.shown(capsys, "eval", *words, *prompts, "--kl", "-o", "json"))
        return report["domains"], report["agreement"]

    expected = divergence(merged, base)
    assert expected == divergence(base, base, "--adapter", adapter)
    assert divergence(base, merged) == divergence(base, adapter), "as a draft"
    for words in ([merged], [base, "--adapter", adapter]):
        place = tmp_path / str(len(words))
        tiny.shown(capsys, "export-gguf", *words, "--outtype", "f16", "--to", place, "--no-check")
    exported = [next((tmp_path / name).glob("*.gguf")) for name in "13"]
    assert exported[1].name == "adapter-f16.gguf"
    sizes = [path.read_bytes() for path in exported]
    assert sizes[0][-100_000:] == sizes[1][-100_000:]
    values = tiny.recipe_values(base.parent, elsewhere=True) | {"train": {"steps": 2, "dtype": "float32"}}
    drafts = []
    for name, target in (("one", {"model": str(merged)}), ("other", {"model": str(base), "adapter": str(adapter)})):
        recipe = tiny.write_recipe(tmp_path / f"{name}.yaml", values | {"name": name, "target": target})
        tiny.told(capsys, "train", recipe, "--runs", tmp_path, "--until", "train")
        drafts.append((tmp_path / name / "draft" / "model.safetensors").read_bytes())
    assert drafts[0] == drafts[1]
    assert "fits it" in tiny.shown(capsys, "check", base, base, "--adapter", adapter)
    # Servers cannot read a base with an adapter.
    assert served_name(over(str(base), str(adapter))) == str(folder) and (folder / "model.safetensors").is_file()
    assert served_name(over(str(base), str(tmp_path / "elsewhere"))) == "merged-target"
    assert served_name(str(base)) == str(base)


def test_a_plan_says_whether_to_adapt(
    tuned: tuple[Path, Path, Path], tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """By the acceptance that it measured, which its forecast takes, too."""
    base, adapter, merged = tuned
    monkeypatch.setattr(order, "TOKENS", 12)
    prompts = ("--prompts", base.parent / "corpus" / "test", "--lengths", "2", "--tokens", 8)
    blurred = tmp_path / "blurred"
    shutil.copytree(base, blurred)
    tensors = load_file(base / "model.safetensors")
    torch.manual_seed(5)
    noisy = {name: value + 0.1 * torch.randn_like(value) for name, value in tensors.items()}
    save_file(noisy, blurred / "model.safetensors", {"format": "pt"})
    said = tiny.shown(capsys, "plan", base, blurred, "--adapter", adapter, *prompts)
    assert f"target.model={base} target.adapter={adapter} cut.donor={blurred}" in said and "from 0.80 to 0.98" in said
    assert "answers to 8 prompts (96 tokens)" in said and "measured" in said
    fine = order.MeasuredAcceptance(Interval(0.97, 0.95, 0.99), 8, 96, [0.9])
    assert "would gain little" in order.advice(str(merged), str(base), fine)
    assert "--prompts: without effect without a second model" in tiny.refused(capsys, "plan", merged, *prompts[:2])
    assert "leave one out" in tiny.refused(capsys, "plan", merged, base, *prompts[:2], "--acceptance", "0.5")


def test_weights_are_equal_in_the_type_of_the_base(tuned: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """bfloat16 stays, in which PEFT adds up; relatives of LoRA are merged, too."""
    base = tmp_path / "base"
    transformers.AutoModelForCausalLM.from_pretrained(tuned[0], dtype=torch.bfloat16).save_pretrained(base)
    for number, settings in enumerate(({}, {"use_dora": True}, {"use_rslora": True, "bias": "all"})):
        expected = tune(base, tmp_path / str(number), **settings).state_dict()
        folder = local_folder(over(str(base), str(tmp_path / str(number))))
        found = load_file(folder / "model.safetensors")
        assert all(torch.equal(expected[name], value) for name, value in found.items())
        assert {value.dtype for value in found.values()} == {torch.bfloat16}


def test_a_recipe_names_it(tuned: tuple[Path, Path, Path], world: Path, tmp_path: Path) -> None:
    """Read with its base as one reference, written as in the recipe; its content is part of the keys."""
    base, adapter, _ = tuned
    shutil.copytree(adapter, tmp_path / "adapter")
    values = tiny.recipe_values(world, elsewhere=True)
    values["target"]["adapter"] = "./adapter"
    path = tiny.write_recipe(tmp_path / "recipe.yaml", values)
    recipe = load_recipe(path)
    assert parts_of(recipe.target.model) == (str(base), str(tmp_path / "adapter"))
    written = yaml.safe_load(dump_recipe(recipe))["target"]
    assert (written["model"], written["adapter"]) == (str(base), str(tmp_path / "adapter"))
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "config.yaml") == recipe
    assert parts_of(load_recipe(path, ["target.adapter=null"]).target.model) == (str(base), None)
    before = reference_digest(recipe.target.model), local_folder(recipe.target.model)
    edit(tmp_path / "adapter" / SETTINGS, lora_alpha=16)
    after = reference_digest(recipe.target.model), local_folder(recipe.target.model)
    assert before[0] != after[0] and before[1] != after[1], "other content is another model"
    assert parts_of(load_recipe(path, ["cut.donor=./adapter"]).donor_model)[1] == str(tmp_path / "adapter")


def test_it_brings_its_own_template(tuned: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """And what was begun and lost in the cache is made again."""
    base, adapter, _ = tuned
    shutil.copytree(adapter, tmp_path / "adapter")
    (tmp_path / "adapter" / "chat_template.jinja").write_text("own")
    reference = over(str(base), str(tmp_path / "adapter"))
    folder = local_folder(reference, weights=False)
    assert (folder / "chat_template.jinja").read_text() == "own" and not (folder / "model.safetensors").exists()
    # Text in tokenizer_config.json counts as well, although the base has a file, which transformers would prefer.
    inline = tmp_path / "inline"
    shutil.copytree(adapter, inline)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, inline / name)
    settings = json.loads((inline / "tokenizer_config.json").read_text())
    (inline / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "inline"}))
    with_file = tmp_path / "base"
    shutil.copytree(base, with_file)
    (with_file / "chat_template.jinja").write_text("the base's")
    (with_file / "additional_chat_templates").mkdir()
    (with_file / "additional_chat_templates" / "rag.jinja").write_text("the base's")
    assert load_tokenizer(over(str(with_file), str(inline))).chat_template == "inline"
    (inline / "chat_template.jinja").write_text("own")
    (inline / "additional_chat_templates").mkdir()
    (inline / "additional_chat_templates" / "tools.jinja").write_text("tools")
    merged = over(str(with_file), str(inline))
    for _ in range(2):  # The second time, a kill has left all but the mark of an end.
        assert load_tokenizer(merged).chat_template == {"default": "own", "tools": "tools"}
        (local_folder(merged, weights=False) / "merged.json").unlink()
    whole = local_folder(reference) / "model.safetensors"
    content = whole.read_bytes()
    whole.write_bytes(content[:-10])
    assert local_folder(reference) == folder and whole.read_bytes() == content
    shutil.rmtree(folder)
    assert load_config(reference).hidden_size == load_config(str(base)).hidden_size


def renamed(**names: str) -> Damage:
    def change(adapter: Path) -> None:
        tensors = load_file(adapter / TENSORS)
        save_file({names.get(name, name): tensor for name, tensor in tensors.items()}, adapter / TENSORS)

    return change


def without(name: str) -> Damage:
    def change(adapter: Path) -> None:
        tensors = load_file(adapter / TENSORS)
        del tensors[name]
        save_file(tensors, adapter / TENSORS)

    return change


def infinite(adapter: Path) -> None:
    tensors = load_file(adapter / TENSORS)
    tensors[LAYER][0, 0] = torch.inf
    save_file(tensors, adapter / TENSORS)


REFUSED: dict[str, tuple[Damage, str]] = {
    "no settings": (lambda a: (a / SETTINGS).unlink(), f"holds no {SETTINGS}"),
    "no folder": (shutil.rmtree, "does not exist"),
    "settings of no kind": (lambda a: (a / SETTINGS).write_text("{}"), "cannot be merged"),
    "a kind that nobody knows": (lambda a: edit(a / SETTINGS, peft_type="MAGIC"), "MAGIC"),
    "prompt tuning": (lambda a: prompt_tuning(a), "of the kind PROMPT_TUNING, which has no weights to add"),
    "no tensors": (lambda a: (a / TENSORS).unlink(), f"holds no {TENSORS}"),
    "half a file": (lambda a: (a / TENSORS).write_bytes((a / TENSORS).read_bytes()[:-4]), "cut short or damaged"),
    "a tensor less": (without(LAYER), f"lacks 1 tensors .* the first is {LAYER}"),
    "a tensor more": (renamed(**{LAYER: "other"}), "lacks 1 tensors"),
    "of a deeper model": (
        lambda a: deeper(a),
        r"no place for 2 tensors of the adapter .* first is base_model.model.model.layers.9",
    ),
    "of a wider model": (lambda a: edit(a / SETTINGS, r=8), r"lora_A.weight is \[4, 64\] in the adapter .*\[8, 64\]"),
    "of other layers": (lambda a: edit(a / SETTINGS, target_modules=["c_attn"]), "c_attn"),
    "not a number": (infinite, "layers.0.self_attn.q_proj.weight of .* infinite or NaN"),
    "the head, which is tied": (lambda a: edit(a / SETTINGS, target_modules=["lm_head"]), "tie_word_embeddings"),
}


def prompt_tuning(adapter: Path) -> None:
    peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2).save_pretrained(adapter)


def deeper(adapter: Path) -> None:
    tensors = load_file(adapter / TENSORS)
    more = {name.replace("layers.0", "layers.9"): tensors[name].clone() for name in tensors if "layers.0.mlp" in name}
    save_file(tensors | more, adapter / TENSORS)


@pytest.mark.parametrize("fault", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(
    tuned: tuple[Path, Path, Path], tmp_path: Path, capsys: Capture, fault: str
) -> None:
    base, adapter, _ = tuned
    damage, words = REFUSED[fault]
    shutil.copytree(adapter, tmp_path / "adapter")
    damage(tmp_path / "adapter")
    reference = over(str(base), str(tmp_path / "adapter"))
    with pytest.raises(DataError, match=words) as raised:
        local_folder(reference)
    assert raised.value.hint and str(tmp_path) in raised.value.what
    said = tiny.refused(capsys, "generate", "a", base, "--adapter", tmp_path / "adapter", "-C", "drafter=none")
    assert raised.value.what in said


def test_a_quantised_base_and_a_base_that_nobody_names(
    tuned: tuple[Path, Path, Path], tmp_path: Path, capsys: Capture
) -> None:
    base, adapter, _ = tuned
    shutil.copytree(base, tmp_path / "base")
    edit(tmp_path / "base" / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(DataError, match="whose weights are quantised"):
        local_folder(over(str(tmp_path / "base"), str(adapter)))
    shutil.copytree(adapter, tmp_path / "adapter")
    edit(tmp_path / "adapter" / SETTINGS, base_model_name_or_path=None)
    with pytest.raises(DataError, match="does not name the model that the adapter is for"):
        resolve_model(str(tmp_path / "adapter"))
    for command in ("eval", "speedup", "generate"):
        words = ["a"] if command == "generate" else []
        assert "--adapter: without effect with" in tiny.refused(capsys, command, *words, "--adapter", adapter)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{}")
    for command in ("check", "plan"):
        assert "target.adapter=" in tiny.refused(capsys, command, recipe, "--adapter", adapter)


def test_a_file_is_a_base(gguf_toys: tuple[Path, Path], tmp_path: Path) -> None:
    """Its imported folder is."""
    file, _ = gguf_toys
    folder = local_folder(str(file))
    expected = tune(folder, tmp_path / "adapter", target_modules=["q_proj"]).state_dict()
    found = load_model(over(str(file), str(tmp_path / "adapter")), "float32", torch.device("cpu")).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_file_that_rounds_the_adapter_away_is_a_fault(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """The base was rounded to 4 bits. Rounded to the same 4 bits, its weights go back to where they were."""
    tiny.shown(capsys, "export-gguf", world / "target", "--outtype", "q4_0", "--to", tmp_path, "--no-check")
    (file,), adapter = tmp_path.glob("*.gguf"), tmp_path / "adapter"
    tune(local_folder(str(file)), adapter)
    small = {name: 0.16 * value for name, value in load_file(adapter / TENSORS).items()}
    save_file(small, adapter / TENSORS, {"format": "pt"})
    types = ("--outtype", "q4_0", "--outtype", "q8_0")
    capsys.readouterr()
    assert tiny.call("export-gguf", file, "--adapter", adapter, *types, "--to", tmp_path / "out") == 2
    shown = capsys.readouterr()
    left = dict(re.findall(r"adapter-(\w+)\.gguf .* (\d+)% of the adapter's change left", shown.out))
    assert left.keys() == {"q4_0", "q8_0"} and int(left["q4_0"]) < 10 and 90 <= int(left["q8_0"]) <= 110
    (fault,) = (line for line in shown.err.splitlines() if line.startswith("distill: "))
    assert "adapter-q4_0.gguf: " in fault and "a base in 16 bits" in fault and fault.count(".gguf") == 1
