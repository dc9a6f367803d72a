"""Models whose files say more, or less, than most do: ends of text, caches that cannot be rolled back, tokens without
rows, heads that scale their logits."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file
from toys import toy

from distill.data.packing import pack
from distill.engines.loaded import encode_prompt
from distill.engines.pairs import VocabularyMetadata, distill_rule
from distill.engines.torch.hugging_face import encode, end_ids, load_model, load_tokenizer
from distill.engines.torch.model import TorchModel
from distill.errors import DataError, PairError
from distill.files import remove_left, write_atomically
from distill.gguf.tokenizer import read_tokenizer
from distill.pipeline.preflight import check_stages
from distill.recipe import Cut, load_recipe
from distill.surgery.cutter import cut_folder, scored_logits
from distill.surgery.subtokens import check_transplant

pytestmark = pytest.mark.usefixtures("one_thread")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def folder(world: Path, tmp_path: Path) -> Path:
    """A copy of the world's target that a test may change."""
    return Path(shutil.copytree(world / "target", tmp_path / "model"))


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


@pytest.mark.parametrize("stated", [7, [7, 9], [9]])
def test_generation_config_names_further_ends(folder: Path, stated: Any) -> None:
    """As transformers' own generate stops at them."""
    tokenizer = load_tokenizer(str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    before = end_ids(str(folder), tokenizer)
    edit(folder / "generation_config.json", eos_token_id=stated)
    assert end_ids(str(folder), tokenizer) == sorted({*before, *(stated if isinstance(stated, list) else [stated])})
    model = load_model(str(folder), "float32", torch.device("cpu"))
    assert model.generation_config.eos_token_id == stated


def test_a_damaged_end_is_refused(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id="</s>")
    with pytest.raises(DataError, match="eos_token_id is '</s>'"):
        end_ids(str(folder), load_tokenizer(str(folder)))


def recurrent() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2))


def convolutional() -> Any:
    return transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            layer_types=["conv", "full_attention"],
        )
    )


@pytest.mark.parametrize("make", [recurrent, convolutional])
def test_a_state_that_cannot_be_cut_is_refused(make: Any) -> None:
    """By the class that cuts; test_recurrent.py has the one that returns to copies."""
    with pytest.raises(DataError, match="cannot be decoded here: it has"):
        TorchModel(make())


def test_a_kind_of_layer_without_a_cache_is_refused_before_weights_are_read(world: Path, tmp_path: Path) -> None:
    config = transformers.Lfm2Config(vocab_size=61, num_hidden_layers=1, layer_types=["indexed_attention"])
    config.save_pretrained(tmp_path / "target")
    recipe = load_recipe(
        world / "recipe.yaml", [f"target.model={tmp_path / 'target'}", f"cut.donor={world / 'target'}"]
    )
    with pytest.raises(DataError, match="cannot be decoded here: it has layers of kind"):
        check_stages(recipe)


def test_models_that_are_no_language_model_alone_are_refused(tmp_path: Path, capsys: Capture) -> None:
    transformers.Gemma3Config().save_pretrained(tmp_path / "composite")
    with pytest.raises(DataError, match="is a gemma3, whose language model is only one of its parts"):
        load_model(str(tmp_path / "composite"), "float32", torch.device("cpu"))
    transformers.BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path / "bloom")
    assert "names no max_position_embeddings" in tiny.refused(capsys, "profile", tmp_path / "bloom")


def with_image_token(folder: Path) -> int:
    """Give a folder's tokenizer a special token behind its rows, as Gemma 3's has; the number of rows."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    rows = 1 + max(*tokenizer["model"]["vocab"].values(), *(one["id"] for one in tokenizer["added_tokens"]))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"].append({"id": rows, "content": "<image_soft_token>", "special": True, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return rows


def test_special_tokens_behind_the_rows_are_left_out(folder: Path, world: Path) -> None:
    """The export has the tokens that the model has; so have transplants. A token that texts hold is no such token."""
    rows = with_image_token(folder)
    found = read_tokenizer(folder, rows)
    assert len(found.tokens) == rows and "<image_soft_token>" not in found.tokens
    edit(folder / "config.json", vocab_size=rows)
    plan = check_transplant(world / "target", folder)
    assert plan.rows == plan.target.size == rows
    with pytest.raises(DataError, match=r"no row in the model, .*: .image. \("):
        content = json.loads((folder / "tokenizer.json").read_text())
        content["added_tokens"][-1] |= {"special": False, "content": "image"}
        (folder / "tokenizer.json").write_text(json.dumps(content))
        check_transplant(world / "target", folder)


def sentencepiece(tokens: list[str]) -> VocabularyMetadata:
    return VocabularyMetadata("x", "llama", tokens, 0, 1, False, False, 64, "llama", chat_template=False)


def test_spaces_of_added_tokens_are_the_same_in_files_and_folders() -> None:
    """Converters write ▁▁ of Gemma's folder as two spaces."""
    folder, file = sentencepiece(["<s>", "</s>", "▁a", "▁▁"]), sentencepiece(["<s>", "</s>", "▁a", "  "])
    assert distill_rule(folder, file) is None and distill_rule(file, folder) is None
    other = distill_rule(folder, sentencepiece(["<s>", "</s>", "▁a", "   "]))
    assert other is not None and "token 3" in other[0]


def test_special_tokens_in_a_prompt_are_read_alike(gguf_toys: tuple[Path, Path]) -> None:
    file = gguf_toys[0]
    folder = file.with_suffix("")
    tokenizer = load_tokenizer(str(folder))
    text = f"one {tokenizer.eos_token} two"
    ids = encode_prompt(str(file), text)
    assert tokenizer.eos_token_id in ids and ids == encode_prompt(str(folder), text) == encode(tokenizer, text)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("granite", {"logits_scaling": 3.0}),
        ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
        ("gemma2", {"query_pre_attn_scalar": 8, "final_logit_softcapping": 4.0, "tie_word_embeddings": True}),
        ("llama", {}),
    ],
)
def test_logits_of_a_cut_are_the_models_own(kind: str, settings: dict[str, Any]) -> None:
    model = toy(kind, vocabulary=61, **settings)
    ids = [1 + 7 * place % 59 for place in range(12)]
    with torch.no_grad():
        found = scored_logits(model, pack([(ids, 4)], 12, split_long=False))
        own = model(input_ids=torch.tensor([ids])).logits[0, 3:-1]
    assert torch.allclose(found, own, atol=1e-4)


def test_a_cut_is_compared_with_a_target_of_its_own_vocabulary(world: Path, tmp_path: Path) -> None:
    tiny.build_model(tmp_path / "other", vocabulary=300)
    texts = [tiny.document(number) for number in range(8)]
    with pytest.raises(PairError, match="does not fit the target"):
        cut_folder(str(world / "target"), tmp_path / "cut", Cut(layers=1), texts, str(tmp_path / "other"))
    assert not (tmp_path / "cut").exists()


def test_a_transplant_replaces_no_model(world: Path, folder: Path, capsys: Capture) -> None:
    before = load_file(folder / "model.safetensors")
    assert "is not empty" in tiny.refused(capsys, "transplant", world / "target", world / "target", folder)
    assert load_file(folder / "model.safetensors").keys() == before.keys()


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """Of processes that are gone, and not before ten minutes: another machine may share the folder."""
    gone, ours = 2**22 + 1, os.getpid()  # behind the largest number of a process
    names = {f".big.{gone}.tmp": False, f".big.{ours}.tmp": True, f".other.{gone}.tmp": True, ".big.x.tmp": True}
    for name in names:
        (tmp_path / name).write_text("")
        os.utime(tmp_path / name, (time.time() - 3600,) * 2)
    (tmp_path / f".big.{gone + 1}.tmp").write_text("")  # written to just now
    remove_left(tmp_path, "big", "tmp")
    assert {name: (tmp_path / name).exists() for name in names} == names
    assert (tmp_path / f".big.{gone + 1}.tmp").exists()
    os.utime(tmp_path / f".big.{gone + 1}.tmp", (0, 0))
    write_atomically(tmp_path / "big", lambda place: place.write_text("new"), several=True)
    assert (tmp_path / "big").read_text() == "new" and not (tmp_path / f".big.{gone + 1}.tmp").exists()
