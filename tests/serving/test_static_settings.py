"""The static cache from recipes and the command line: the same text, keys of stages, and what is refused beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from test_answering import PROMPT, Capture, asked, folders
from toys import save_toy, toy, toy_tokenizer

from distill.decoding.costs import measure_steps
from distill.engines.loaded import Opening, load_pair
from distill.engines.torch.static import StaticTorchModel
from distill.errors import DataError, RecipeError
from distill.pipeline.preflight import check_device, check_static
from distill.recipe import PyTorch, Target, load_recipe
from distill.serving.terminal import stream

__all__ = ["folders"]  # a fixture
torch.set_num_threads(1)
STATIC = PyTorch(static=True)


def test_a_static_pair_continues_as_the_other(folders: Path, capsys: Capture) -> None:
    """Also beyond the draft's context, with trees, and with a grammar."""
    beyond = [asked(drafter=name) for name in ("none", "lookup+draft", "tree")]
    beyond += [asked(rule="p_min", p_min=0.2), asked(grammar=("regex", "[a-z ]+"))]
    elsewhere = PyTorch(static=True, draft_device="cpu")
    for draft, request, static in (
        *(("short", request, STATIC) for request in beyond),
        *(("draft", request, STATIC) for request in (asked(), asked(drafter="tree"))),
        ("draft", asked(), elsewhere),
    ):
        texts = []
        for settings in (PyTorch(), static):
            pair = Target(model=str(folders / "target")), str(folders / draft), "cpu", 1, None, settings
            stream(Opening(*pair), PROMPT, 30, request)
            texts.append(capsys.readouterr().out)
        assert texts[0] == texts[1] and len(texts[0]) > len(PROMPT) + 5


def test_the_size_comes_from_the_request(folders: Path) -> None:
    target = Target(model=str(folders / "target"))
    with load_pair(target, str(folders / "draft"), pytorch=STATIC, tokens=70) as pair:
        assert isinstance(pair.target, StaticTorchModel) and isinstance(pair.draft, StaticTorchModel)
        assert pair.target.size == pair.draft.size == 192  # 70, a step behind them, and up to the next 64
        # What times steps takes this model as any other.
        found = measure_steps(pair.target, [1, 2, 5], 20, 2)
        assert set(found) == {1, 2, 5} and pair.target.lengths == [20]


def test_options_and_keys_that_do_not_go_together(world: Path, folders: Path, tmp_path: Path, capsys: Capture) -> None:
    pair = ("generate", "def f(", folders / "target", folders / "draft", "--tokens", 5)
    assert tiny.shown(capsys, *pair, "--pytorch", "static=true").startswith("def f(")
    with pytest.raises(RecipeError, match=r"settings of PyTorch"):
        load_pair(Target(model="a.gguf"), pytorch=STATIC)
    with pytest.raises(RecipeError, match="set static, too"):
        load_recipe(world / "recipe.yaml", ("pytorch.compile=true",))
    with pytest.raises(Exception, match="device `nowhere` cannot be used"):
        check_device(load_recipe(world / "recipe.yaml", ("pytorch.draft_device=nowhere",)))


def test_check_refuses_a_target_that_cannot(world: Path, tmp_path: Path, capsys: Capture) -> None:
    tokenizer, folder = toy_tokenizer(), tmp_path / "local"
    save_toy(toy("gpt_neo", vocabulary=len(tokenizer)), tokenizer, folder)
    static = ("pytorch.static=true", f"cut.donor={folder}")
    assert check_static(load_recipe(world / "recipe.yaml", static[:1])) == []
    assert check_static(load_recipe(world / "recipe.yaml", (*static, "speedup.backends=[gguf]"))) == []
    with pytest.raises(DataError, match=r"local cannot decode with a static cache: .*of the kind global"):
        check_static(load_recipe(world / "recipe.yaml", static))
    assert tiny.call("check", world / "recipe.yaml", "pytorch.static=true") == 0
