"""llama.cpp's options: each has its effect, and what a build or a file does not allow is refused before loading."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny

pytest.importorskip("llama_cpp")
import llama_cpp
from tiny import Capture
from torch import Tensor

from distill.cli.shared import merged
from distill.engines.llama_cpp.model import GgufModel
from distill.errors import RecipeError
from distill.files import read_json
from distill.gguf import library
from distill.gguf.writer import export_gguf
from distill.measuring.speedup import speedup
from distill.pipeline.stages import find_stage, key_parts
from distill.recipe import Gguf, GgufOptions, Recipe, load_recipe, parse_section
from distill.recipe.measuring import ON_CPU, CacheType
from distill.run import Run

IDS = list(range(5, 45))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """GGUF files by the size of a head."""
    folder, found = tmp_path_factory.mktemp("gguf"), {}
    for size in (16, 32):
        tiny.build_model(folder / str(size), layers=2, seeds=range(10), width=4 * size)
        found[size] = export_gguf(folder / str(size), folder / f"{size}.gguf", "f32").path
    return found


class Seen:
    """What a model opened with some options is like."""

    def __init__(self, path: Path, **options: Any) -> None:
        with GgufModel(path, context=128, batch=64, threads=1, options=GgufOptions(**options)) as model:
            context = model._context._context
            self.threads = llama_cpp.llama_n_threads(context), llama_cpp.llama_n_threads_batch(context)
            self.micro_batch = llama_cpp.llama_n_ubatch(context)
            self.logits = model.extend(IDS).full()
            self.state = llama_cpp.llama_state_get_size(context)  # of the cells that are used


@pytest.fixture(scope="module")
def usual(files: dict[int, Path]) -> Seen:
    return Seen(files[32])


@pytest.fixture(scope="module")
def flash(files: dict[int, Path]) -> Seen:
    return Seen(files[32], flash_attn="on")


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize("name", ["cache_type_k", "cache_type_v"])
@pytest.mark.parametrize("kind", [kind for kind in get_args(CacheType) if kind != "f16"])
def test_the_type_of_the_cache_changes_its_size_and_the_logits(
    name: str, kind: str, files: dict[int, Path], usual: Seen, flash: Seen
) -> None:
    found = Seen(files[32], **{name: kind}, flash_attn="on")
    bits = {"f32": 32, "bf16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5}[kind]
    values = len(IDS) * 2 * 2 * 32  # of the keys, or of the values: 2 layers of 2 heads
    assert found.state - usual.state == values * (bits - 16) / 8
    if kind != "f32":  # which flash attention reads as f16
        assert apart(found.logits, flash.logits) > 1e-3
    if name == "cache_type_k":
        assert apart(Seen(files[32], cache_type_k=kind).logits, usual.logits) > 1e-3


def test_flash_attention_is_off_unless_asked_for(files: dict[int, Path], usual: Seen, flash: Seen) -> None:
    assert 0 < apart(flash.logits, usual.logits) < 0.1
    assert apart(Seen(files[32], flash_attn="auto").logits, flash.logits) == 0  # a CPU has it
    assert apart(Seen(files[32], flash_attn="off").logits, usual.logits) == 0


def test_threads_reach_the_context(files: dict[int, Path], usual: Seen) -> None:
    assert usual.threads == (1, 1)
    assert Seen(files[32], threads=2).threads == (2, 2)
    assert Seen(files[32], threads=1, threads_batch=2).threads == (1, 2)
    assert apart(Seen(files[32], threads=2).logits, usual.logits) == 0


def test_a_micro_batch_divides_a_call(files: dict[int, Path], usual: Seen) -> None:
    seven, one = Seen(files[32], ubatch_size=7), Seen(files[32], ubatch_size=1)
    assert (usual.micro_batch, seven.micro_batch, one.micro_batch) == (64, 7, 1)
    assert apart(seven.logits, usual.logits) == 0  # no token is computed alone
    assert 0 < apart(one.logits, usual.logits) < 0.01  # every token is


def test_a_tree_larger_than_the_micro_batch(files: dict[int, Path]) -> None:
    parents = [-1, -1, 0, 1, 2, 3]
    found = []
    for options in (GgufOptions(), GgufOptions(ubatch_size=4)):
        with GgufModel(files[32], context=128, batch=64, threads=1, max_leaves=4, options=options) as model:
            model.extend(IDS)
            found.append(model.extend([7, 8, 9, 10, 11, 12], parents=parents).full())
            model.keep([[1, 3, 5]])
            found.append(model.extend([13]).full())
    assert apart(found[0], found[2]) < 0.01 and apart(found[1], found[3]) < 0.01


@pytest.fixture
def never_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = llama_cpp.llama_model_load_from_file

    def load(path: bytes, parameters: Any) -> Any:
        assert parameters.vocab_only, "the model was loaded"
        return begin(path, parameters)

    monkeypatch.setattr(llama_cpp, "llama_model_load_from_file", load)


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_type_k": "q8_0"}, "cache_type_k q8_0 stores blocks of 32 values, which do not divide a head of 16"),
        ({"cache_type_v": "q4_0", "flash_attn": "on"}, "cache_type_v q4_0 stores blocks of 32"),
    ],
)
def test_a_cache_type_that_does_not_fit_a_head(options: dict[str, Any], words: str, files: dict[int, Path]) -> None:
    with pytest.raises(RecipeError, match=words) as caught:
        GgufModel(files[16], options=GgufOptions(**options))
    assert str(files[16]) in caught.value.what and "f16" in caught.value.hint


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize("options", [{"n_gpu_layers": 9}, {"device": ["CUDA0"]}, {"tensor_split": [3, 1]}])
def test_a_cpu_only_build_takes_no_gpu_options(
    options: dict[str, Any], files: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "gpus", list)
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: False)
    with pytest.raises(RecipeError, match=f"{next(iter(options))} .*is built for CPUs only") as caught:
        GgufModel(files[32], options=GgufOptions(**options))
    assert "DGGML_CUDA=on" in caught.value.hint
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: True)
    with pytest.raises(RecipeError, match="finds no GPU on this machine"):
        GgufModel(files[32], options=GgufOptions(**options))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [library.Device("CUDA0", "one", 4096), library.Device("CUDA1", "other", 8192)]
    monkeypatch.setattr(library, "gpus", lambda: found)


@pytest.mark.usefixtures("two_gpus")
def test_options_of_gpus_become_parameters() -> None:
    def settings(**options: Any) -> tuple[int, list[int] | None, list[float] | None]:
        checked = GgufOptions(**options)
        library.require_build(checked, "x")
        found, kept = library.model_settings(checked)
        devices = ctypes.cast(found.devices, ctypes.POINTER(ctypes.c_void_p)) if found.devices else None
        named = None if devices is None else [devices[i] for i in range(1 + len(checked.device)) if devices[i]]
        split = found.tensor_split[: llama_cpp.llama_max_devices()] if found.tensor_split else None
        assert kept or not (devices or split)
        return found.n_gpu_layers, named, split

    default = llama_cpp.llama_model_default_params().n_gpu_layers
    assert settings() == (default, None, None) and default < 0  # all layers
    assert settings(n_gpu_layers=7) == (7, None, None)
    assert settings(device=["CUDA1", "CUDA0"]) == (default, [8192, 4096], None)
    assert settings(device=["none"]) == (0, [], None)
    assert settings(tensor_split=[3, 1])[2] == [3.0, 1.0, *[0.0] * (llama_cpp.llama_max_devices() - 2)]
    assert library.describe_build() == "llama.cpp: GPUs CUDA0 (one), CUDA1 (other)"


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": ["CUDA0", "Metal"]}, "there is no device Metal.*CUDA0, CUDA1"),
        ({"tensor_split": [1, 1, 1]}, "tensor_split 1,1,1: 3 shares for 2 GPUs"),
        ({"tensor_split": [1, 1], "device": ["CUDA1"]}, "2 shares for 1 GPUs"),
    ],
)
def test_options_that_the_gpus_do_not_allow(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        library.require_build(GgufOptions(**options), "x")
    assert re.search(words, f"{caught.value.what} {caught.value.hint}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_type_v": "q8_0"}, "needs flash attention"),
        ({"cache_type_k": "q3_k"}, "no cache_type_k 'q3_k'; known: f32, f16"),
        ({"tensor_split": [0, 0]}, "one of them above 0"),
        ({"tensor_split": [1], "n_gpu_layers": 0}, "does nothing"),
        ({"tensor_split": [1], "device": ["none"]}, "does nothing"),
        ({"n_gpu_layers": 3, "device": ["none"]}, "no layer can be on a GPU"),
        ({"n_gpu_layers": 0, "device": ["CUDA0"]}, "no layer would be there"),
        ({"device": ["none", "CUDA0"]}, "none stands alone"),
        ({"device": ["CUDA0", "CUDA0"]}, "named once"),
        ({"n_gpu_layer": 3}, "did you mean `n_gpu_layers`"),
        ({"threads": 0}, "input should be greater than or equal to 1"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_section(Gguf, {"draft": options})
    assert words in str(caught.value)


def tiny_recipe(world: Path, *overrides: str) -> Recipe:
    return load_recipe(world / "recipe.yaml", overrides)


def test_a_recipe_fills_in_threads_and_device(world: Path) -> None:
    recipe = tiny_recipe(world, "threads=2", "gguf.draft.threads=1", "gguf.target.flash_attn=on")
    assert recipe.gguf_options("target").threads == 2 and recipe.gguf_options("draft").threads == 1
    assert recipe.gguf_options("target").device == ON_CPU.device == ("none",)  # device: cpu
    assert recipe.gguf.described() == "target: flash-attn on; draft: threads 1"
    gpu = tiny_recipe(world, "device=auto", "gguf.target.n_gpu_layers=5", "gguf.target.tensor_split=[3, 1]")
    assert gpu.gguf_options("target").n_gpu_layers == 5 and gpu.gguf_options("draft").device == ()
    assert gpu.gguf.described() == "target: n-gpu-layers 5, tensor-split 3,1"


@pytest.mark.parametrize(
    ("stage", "override", "changes"),
    [
        ("teacher", "gguf.target.cache_type_k=q8_0", True),
        ("teacher", "gguf.target.flash_attn=on", True),
        ("teacher", "gguf.target.n_gpu_layers=3", False),  # rounding alone
        ("teacher", "gguf.draft.cache_type_k=q8_0", False),
        ("answers", "gguf.target.cache_type_k=q8_0", True),
        ("answers", "gguf.target.threads=2", False),
        ("speedup", "gguf.target.threads=2", True),
        ("speedup", "gguf.draft.n_gpu_layers=3", True),
        ("speedup", "gguf.draft.ubatch_size=8", True),
        ("train", "gguf.target.cache_type_k=q8_0", False),
        ("speedup", "gguf.target.flash_attn=off", False),  # the default
    ],
)
def test_keys_hold_what_changes_results(stage: str, override: str, changes: bool, world: Path, tmp_path: Path) -> None:
    def parts(*overrides: str) -> dict[str, Any]:
        recipe = tiny_recipe(world, "teacher.gguf=x.gguf", "answers.writer={gguf: x.gguf}", *overrides)
        run = Run(tmp_path / "run", recipe)
        return key_parts(find_stage(stage), recipe, run)

    assert (parts(override) != parts()) is changes


def test_check_names_the_build_and_refuses(world: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "gpus", list)
    monkeypatch.setattr(llama_cpp, "llama_supports_gpu_offload", lambda: False)
    recipe = world / "recipe.yaml"
    assert "llama.cpp: a CPU-only build" in tiny.shown(capsys, "check", recipe)
    for override, words in (
        ("gguf.draft.n_gpu_layers=9", "gguf.draft: n_gpu_layers 9: the installed llama.cpp is built for CPUs only"),
        ("gguf.target.cache_type_k=q8_0", "gguf.target: cache_type_k q8_0 stores blocks of 32 values"),
    ):
        assert words in tiny.refused(capsys, "check", recipe, override)
    unused = ("speedup.backends=[pytorch]", "gguf.draft.ubatch_size=8")
    assert "opens no GGUF file of the draft" in tiny.refused(capsys, "check", recipe, *unused)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, GgufOptions, int | None]]]:
    """The files that were opened, with their options."""
    found: list[tuple[str, GgufOptions, int | None]] = []
    begin: Callable[..., None] = GgufModel.__init__

    def noted(self: GgufModel, path: Any, **settings: Any) -> None:
        found.append((Path(path).name, settings.get("options", ON_CPU), settings.get("threads")))
        begin(self, path, **settings)

    monkeypatch.setattr(GgufModel, "__init__", noted)
    yield found


def test_generate_and_profile_pass_the_options_on(
    files: dict[int, Path], opened: list[tuple[str, GgufOptions, int | None]], capsys: Capture
) -> None:
    pair = (files[32], files[32], "--tokens", 4, "--threads", 1)
    options = ("--llama", "ctk=q8_0,ub=32", "--llama-draft", "fa=on,cache-type-v=q4_0", "--llama-draft", "t=2")
    tiny.shown(capsys, "generate", "def alpha", *pair, *options)
    assert opened == [
        ("32.gguf", GgufOptions(cache_type_k="q8_0", ubatch_size=32), 1),
        ("32.gguf", GgufOptions(flash_attn="on", cache_type_v="q4_0", threads=2), 1),
    ]
    opened.clear()
    sizes = ("--max-tokens", 2, "--repeats", 5, "--depths", 8)
    tiny.shown(capsys, "profile", files[32], *sizes, "--llama", "threads_batch=2")
    assert opened == [("32.gguf", GgufOptions(threads_batch=2), None)]


@pytest.mark.usefixtures("never_loaded")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--llama-draft", "ngl=4"), "n_gpu_layers 4: the installed llama.cpp"),
        (("--llama", "ts=1,x"), "tensor_split.1: input should be a valid number"),
        (("--llama", "ctv=q8_0"), "target: cache_type_v q8_0 needs flash attention"),
        (("-C", "drafter=lookup", "--llama-draft", "ub=8"), "--llama-draft: without effect because no draft is loaded"),
        (("-ctk", "q8_0"), "llama.cpp's options are --llama cache_type_k=VALUE"),
        (("--llama", "ctx=1"), "ctx"),
    ],
)
def test_generate_refuses(
    options: tuple[Any, ...], words: str, files: dict[int, Path], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "gpus", list)
    assert words in tiny.refused(capsys, "generate", "def", files[32], files[32], *options)


def test_folders_take_no_options_of_llama_cpp(world: Path, capsys: Capture) -> None:
    pair = (world / "target", world / "target")
    assert "--llama: without effect because PyTorch runs" in tiny.refused(
        capsys, "generate", "def", *pair, "--llama", "ngl=4"
    )
    assert "PyTorch runs" in tiny.refused(capsys, "profile", world / "target", "--llama", "ub=8")


def test_a_run_records_its_options(copied: Path, opened: list[tuple[str, GgufOptions, int | None]]) -> None:
    overrides = ["gguf.target.flash_attn=on", "gguf.draft.ubatch_size=16", "speedup.backends=[gguf]"]
    run = Run(copied, load_recipe(copied / "config.yaml", [*overrides, "speedup.configurations=[]"]))
    for part in copied.glob("speedup/gguf.json"):
        part.unlink()
    speedup(run.recipe, run)
    assert [(name, one.flash_attn, one.ubatch_size) for name, one, _ in opened] == [
        ("target-f16.gguf", "on", None),
        ("draft-f16.gguf", "off", 16),
    ]
    described = "target: flash-attn on; draft: ubatch-size 16"
    assert read_json(copied / "speedup.json")["gguf"] == described
    assert f"llama.cpp's options, where they are not the defaults: {described}." in (copied / "speedup.md").read_text()


def test_options_of_the_command_line_win_over_those_of_the_recipe(world: Path) -> None:
    recipe = tiny_recipe(world, "gguf.target.flash_attn=on", "gguf.target.threads=2", "gguf.draft.ubatch_size=8").gguf
    given = parse_section(Gguf, {"target": {"cache_type_k": "q8_0", "flash_attn": "off"}})
    found = merged(recipe, given)
    assert found.target == GgufOptions(cache_type_k="q8_0", threads=2) and found.draft == GgufOptions(ubatch_size=8)
    quantised = parse_section(Gguf, {"target": {"flash_attn": "on", "cache_type_v": "q8_0"}})
    with pytest.raises(RecipeError, match="needs flash attention"):
        merged(quantised, parse_section(Gguf, {"target": {"flash_attn": "off"}}))
