"""What `check` says of a run's stages without a rehearsal, against runs that were made: seconds from their logs, bytes
of their folders, on 2 cores that make MEASURED_SPEED products and sums a second in bfloat16 (AMD EPYC)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import LlamaConfig, Qwen2Config

from distill.data.sources import Document
from distill.errors import RecipeError
from distill.pipeline.preflight import planned_prompts
from distill.planning.hours import MEASURED_SPEED, planned_hours, time_left
from distill.progress import duration
from distill.recipe import load_recipe

OFF = 1.5
SIBLING = ["cut.mlp_width=null", "cut.trim=null", "cut.allow_full_size=true", "train.steps=0", "speedup.turns=0"]
SIBLING += ["corpus.sources.0.questions=12", "corpus.sources.1.questions=36", "corpus.validation=0.25"]
QWEN = ("qwen2.5-coder-1.5b-instruct-q4_k_m.gguf", 1_117_320_768)
# The target did not write held-out answers in these stages when the runs were made: as few as can be are planned.
HELD_OUT = ["eval.prompts=4", "train.acceptance.prompts=2"]
# By run: recipe, overrides, the target's file, prompts, seconds; bytes on disk of some stages.
# Stages that ran beside other programs, or with the target, which they no longer open, are left out.
RUNS: dict[str, tuple[str, list[str], tuple[str, int], int, dict[str, float], dict[str, float]]] = {
    "the sibling as it is": (  # its cut has less text than cut.score_blocks asks for
        *("qwen-coder-1.5b", SIBLING, QWEN, 36),
        dict(questions=101, teacher=27, table=5, export=139, speedup=504),
        dict(cut=1.98e9, export=531e6),
    ),
    "the sibling's cut": (
        *("qwen-coder-1.5b", [], QWEN, 265),
        dict(questions=430, answers=225, teacher=158, table=22, train=264, export=114, speedup=696),
        dict(teacher=548e6, cut=1.35e9, export=363e6),
    ),
    "SmolLM2": (
        *("smollm2-demo", [], ("SmolLM2-135M-Instruct.Q4_1.gguf", 98_400_000), 250),
        dict(questions=62, answers=66, teacher=26, table=5.2, train=143, export=27, speedup=179),
        dict(teacher=114e6, cut=186e6, train=851e6, export=144e6),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_estimates_beside_what_was_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe_name, overrides, (file, size), prompts, seconds, stored = RUNS[name]
    with (tmp_path / file).open("wb") as sparse:
        sparse.truncate(size)
    settings = [f"target.model={tmp_path / file}", "target.dtype=bfloat16", *overrides, *HELD_OUT]
    recipe = load_recipe(tiny.ROOT / "recipes" / f"{recipe_name}.yaml", settings)
    shape = dict(vocab_size=151_936, num_attention_heads=12, num_key_value_heads=2)
    big: Any = Qwen2Config(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, **shape)
    small: Any = Qwen2Config(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, **shape)
    if recipe_name == "smollm2-demo":
        heads = dict(num_attention_heads=9, num_key_value_heads=3)
        big = small = LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, vocab_size=49_152, **heads
        )
    for module in ("planning.hours", "teacher.store"):
        monkeypatch.setattr(f"distill.{module}.load_config", lambda model: big if model == settings[0][13:] else small)
    found = {one.stage: one for one in planned_hours(recipe, prompts, MEASURED_SPEED)}
    ratios = {stage: found[stage].low / took for stage, took in seconds.items()}
    ratios |= {f"{stage}, disk": found[stage].disk_bytes / took for stage, took in stored.items() if stage in found}
    assert all(1 / OFF < ratio < OFF for ratio in ratios.values()), {one: round(r, 2) for one, r in ratios.items()}
    left = sum(seconds.values())  # what a run says of the whole, from its first third on
    for at, stage in enumerate(seconds):
        done = {other: took if n < at else None for n, (other, took) in enumerate(seconds.items())}
        said = re.fullmatch(r"(?:(\d+)m)?(\d+)s left", time_left([*found.values()], done))
        assert said is not None, stage
        if left < 2 / 3 * sum(seconds.values()):
            assert 1 / OFF < (60 * int(said[1] or 0) + int(said[2])) / left < OFF, (stage, said[0], left)
        left -= seconds[stage]


def test_nothing_is_said_of_what_servers_do(tmp_path: Path, world: Path) -> None:
    settings = ["answers.writer.urls=['http://localhost:1']", "corpus.tokens=0"]
    assert planned_hours(load_recipe(world / "recipe.yaml", settings), 10, MEASURED_SPEED) == []
    assert {one.stage for one in planned_hours(load_recipe(world / "recipe.yaml"), 10, MEASURED_SPEED)} == {
        *("corpus", "answers", "teacher", "cut", "train", "eval", "export", "speedup", "report")
    }


def test_no_more_prompts_are_planned_than_the_corpus_gives() -> None:
    asked = ["corpus.sources.0.questions=12", "corpus.sources.1.questions=36", "corpus.validation=0.25"]
    path = tiny.ROOT / "recipes" / "qwen-coder-1.5b.yaml"
    recipe = load_recipe(path, asked)
    assert planned_prompts(recipe, []) == 36  # answers.prompts asks for 256 where texts have them
    assert planned_prompts(load_recipe(path, ["answers.prompts=20"]), []) == 20
    held_out = Document("a", "validation", "t" * 9_999)
    text = Document("b", "train", "t" * 4 * 10 * (recipe.answers.prompt_tokens + recipe.answers.new_tokens))
    assert planned_prompts(recipe, [held_out, text]) == 36 + 11


def test_hours_on_gpus_that_are_named(tmp_path: Path) -> None:
    """By hand, from the shapes of a 32B target and a 0.6B draft; unknown names, and a target that is too large."""
    from distill.planning.hardware import Hardware, hardware_lines, hardware_of

    assert hardware_of("4 x H100, 1 x A100") == (Hardware(4, "H100"), Hardware(1, "A100"))
    assert hardware_of("1 x RTX 4090 at 4.85 bits") == (Hardware(1, "RTX 4090", 4.85),) * 2
    three = "1 x H100, 1 x H100, 1 x H100"
    for text, said in (("3 x H300", "H300 is not known"), ("H100", "not known"), (three, "names 3")):
        with pytest.raises(RecipeError, match=said):
            hardware_of(text)
    shapes = {"target": (5120, 64, 64, 8, 25600), "donor": (1024, 28, 16, 8, 3072)}
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    for name, values in shapes.items():
        config = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "max_position_embeddings": 4096}
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config | dict(zip(names, values, strict=True))))
    overrides = [f"target.model={tmp_path / 'target'}", f"cut.donor={tmp_path / 'donor'}", "target.dtype=bfloat16"]
    recipe = load_recipe(tiny.ROOT / "recipes" / "server.yaml", overrides)
    weights = 64 * 5120 * (4 * 5120 + 3 * 25600) + 151936 * 5120
    cached = 4 * 64 * 8 * 128 * (256 + 512)
    step = max((2 * weights + 64 * cached) / (0.6 * 3350e9), 2 * weights * 64 / (0.35 * 989e12))
    writing, training, disk = hardware_lines(recipe, 40_000, "1 x H100", "bfloat16")
    # `auto` is the checkpoint's type, whatever it stands for on a machine without instructions for it.
    here = recipe.model_copy(update={"target": recipe.target.model_copy(update={"dtype": "float32"})})
    assert hardware_lines(here, 40_000, "1 x H100", "auto")[0] == writing
    assert f"{64 / step:,.0f} tokens/s with 64 texts at once" in writing
    draft = 28 * 1024 * (4 * 1024 + 3 * 3072) + 151936 * 1024
    seconds = 6 * draft * 500 * 64 * 2048 / (0.35 * 989e12)
    assert f"66 million positions of training, {duration(seconds)}; " in training
    assert "none was measured" in disk
    assert "do not fit the 24.0 GB of 1 x RTX 4090" in hardware_lines(recipe, 40_000, "1 x RTX 4090", "auto")[-1]
