"""Transplants: exact on the donor's own vocabulary, row by row against plain formulas on another."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import tiny
import torch
from safetensors.torch import load_file
from test_vocabulary import byte_level, save, sentencepiece
from tokenizers import Tokenizer
from toys import KINDS, toy
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from distill.errors import DataError
from distill.surgery.layers import FAMILIES
from distill.surgery.results import read_changes, size_of
from distill.surgery.vocabulary import (
    COPY,
    EMBEDDING,
    HEAD,
    MEAN,
    ORIGINS,
    Subtokens,
    check_overrides,
    check_transplant,
    describe_subtokens,
    map_subtokens,
    transplant,
)
from distill.vocabulary.vocabulary import NEVER_IN_UTF8, Vocabulary

torch.set_num_threads(1)
TURNS = ["<|im_start|>", "<|im_end|>", "<end>"]


@cache
def vocabulary(name: str) -> Vocabulary:
    return Vocabulary.read(tiny.real_tokenizer(name))


def bytes_folder(folder: Path) -> Path:
    """A byte-level tokenizer: 256 bytes, `ab`, `Ġab` and three special tokens."""
    tokenizer = byte_level({"Ġab": 257, "Ãł": 258, "çĳ": 259})
    content = json.loads(tokenizer.to_str())
    content["model"]["merges"] = [["a", "b"], ["Ġ", "ab"], ["Ã", "ł"], ["ç", "ĳ"]]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.add_special_tokens(TURNS)
    return save(tokenizer, folder, eos_token="<end>", pad_token="<end>")


def spaces_folder(folder: Path) -> Path:
    """A SentencePiece-like tokenizer, with `<0x61>` beside `a`, a turn marker and an odd special token."""
    words = ["▁", "a", "b", "c", "▁a", "▁ab", "bc", "日"]
    tokenizer = sentencepiece(words, [("▁", "a"), ("▁a", "b"), ("b", "c")], normalise=False)
    tokenizer.add_special_tokens(["<|im_end|>", "<odd>"])
    return save(tokenizer, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template="{{ messages }}")


def model_folder(folder: Path, kind: str = "qwen2", padding: int = 5, **changes: Any) -> Path:
    """A random model for the tokenizer that stands in the folder, with some padding rows."""
    model = toy(kind, vocabulary=Vocabulary.read(folder).size + padding, **changes)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    ids = torch.randint(0, 250, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        return model(ids).logits


@pytest.mark.parametrize(
    "kind, tied, make",
    [
        *itertools.product(KINDS, (True, False), (bytes_folder, spaces_folder)),
        *((kind, True, spaces_folder) for kind in FAMILIES if kind not in KINDS),
    ],
)
def test_its_own_vocabulary_changes_nothing(kind: str, tied: bool, make: Any, tmp_path: Path) -> None:
    donor = model_folder(make(tmp_path / "donor"), kind, tie_word_embeddings=tied)
    path = donor / "config.json"  # Gemma's own says nothing of its head
    stated = json.loads(path.read_text())
    if AutoConfig.for_model(stated["model_type"]).tie_word_embeddings == tied:
        path.write_text(json.dumps({key: value for key, value in stated.items() if key != "tie_word_embeddings"}))
    before = load_file(donor / "model.safetensors")
    change = transplant(donor, donor, tmp_path / "new")
    after = load_file(tmp_path / "new" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(donor), logits(tmp_path / "new"))
    assert change.before == change.after and change.after.tied == tied
    assert change.details["zeros"] == 0 and change.details["same_vocabulary"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert size_of(model) == change.after and model.config.tie_word_embeddings == tied


def by_hand(donor: Vocabulary, subtokens: Subtokens, matrix: torch.Tensor, last: bool) -> torch.Tensor:
    """Rows by the formula, one by one in fp64: the last subtoken's or their mean."""
    rows = []
    for row in range(len(subtokens.origin)):
        ids = subtokens.of(row)
        rows.append(matrix.double()[ids[-1:] if last else ids].mean(0))
    return torch.stack(rows)


@pytest.mark.parametrize(
    "kind, forward, tied, dtype",
    [
        *itertools.product(["qwen2"], (True, False), (True, False), (None, "bfloat16")),
        *((kind, False, True, None) for kind in ("gemma3_text", "granite", "cohere2")),
    ],
)
def test_between_families(kind: str, forward: bool, tied: bool, dtype: str | None, tmp_path: Path) -> None:
    make = (bytes_folder, spaces_folder) if forward else (spaces_folder, bytes_folder)
    donor = model_folder(make[0](tmp_path / "donor"), kind, tie_word_embeddings=tied)
    target = make[1](tmp_path / "target")
    (target / "config.json").write_text(json.dumps({"vocab_size": 290, "eos_token_id": [3, 4]}))
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "temperature": 1.0}))
    change = transplant(donor, target, tmp_path / "new", dtype=dtype)
    ours, theirs = Vocabulary.read(donor), Vocabulary.read(target)
    subtokens = map_subtokens(ours, theirs)
    old, new = load_file(donor / "model.safetensors"), load_file(tmp_path / "new" / "model.safetensors")
    written = torch.bfloat16 if dtype else torch.float32
    assert set(new) == set(old) | {HEAD} and {tensor.dtype for tensor in new.values()} == {written}
    assert all(torch.equal(new[name], old[name].to(written)) for name in set(old) - {EMBEDDING, HEAD})
    count = theirs.size
    exact = by_hand(ours, subtokens, old[EMBEDDING], last=True)
    assert torch.equal(new[EMBEDDING][:count], exact.to(written))
    mean = by_hand(ours, subtokens, old[EMBEDDING] if tied else old[HEAD], last=False)
    tolerance = 2**-8 if dtype else 1e-6
    torch.testing.assert_close(new[HEAD][:count].double(), mean, rtol=tolerance, atol=1e-6)
    single = torch.from_numpy(numpy.diff(subtokens.offsets) == 1)
    assert torch.equal(new[HEAD][:count][single], mean[single].to(written)) and not bool(single.all())
    for name in (EMBEDDING, HEAD):
        assert new[name].shape == (290, 32) and not new[name][count:].any()
        assert bool(new[name][:count].any(1).all())
    assert change.details["padding_rows"] == 290 - count and change.details["zero_rows"] == 0

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert not model.config.tie_word_embeddings and size_of(model) == change.after
    assert size_of(AutoModelForCausalLM.from_pretrained(donor)) == change.before
    assert model.config.eos_token_id == [3, 4] == model.generation_config.eos_token_id
    assert model.config.bos_token_id == theirs.roles.get("bos")
    assert model.config.pad_token_id == theirs.roles.get("pad")
    found, meant = AutoTokenizer.from_pretrained(tmp_path / "new"), AutoTokenizer.from_pretrained(target)
    assert found("ab a\xff日 c<|im_end|>").input_ids == meant("ab a\xff日 c<|im_end|>").input_ids
    assert found.chat_template == meant.chat_template
    recorded = read_changes(tmp_path / "new")
    assert recorded == [json.loads(json.dumps(asdict(change)))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("named", ["TokenizersBackend", "PreTrainedTokenizerFast", None])
def test_the_tokenizer_is_the_targets_in_any_architecture(kind: str, named: str | None, tmp_path: Path) -> None:
    """Not the one that transformers would build for the donor's architecture."""
    donor, target = model_folder(bytes_folder(tmp_path / "donor"), kind), spaces_folder(tmp_path / "target")
    path = target / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": named}
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    transplant(donor, target, tmp_path / "new")
    text = "ab a\xff日 c<|im_end|> 1234 e\u0301"
    meant = Tokenizer.from_file(str(target / "tokenizer.json")).encode(text).ids
    assert AutoTokenizer.from_pretrained(tmp_path / "new")(text).input_ids == meant


def test_the_tokenizer_of_those_who_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With trust_remote_code the entry in auto_map is followed."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    donor, target = model_folder(bytes_folder(tmp_path / "donor")), spaces_folder(tmp_path / "target")
    transplant(donor, target, tmp_path / "new")
    found = AutoTokenizer.from_pretrained(tmp_path / "new", trust_remote_code=True)
    assert type(found).__name__ == "PlainTokenizer"
    text = "ab a日 c"
    assert found(text).input_ids == Tokenizer.from_file(str(target / "tokenizer.json")).encode(text).ids


def test_no_row_count_or_roles_but_the_tokenizers(tmp_path: Path) -> None:
    donor, target = model_folder(spaces_folder(tmp_path / "donor")), bytes_folder(tmp_path / "target")
    transplant(donor, target, tmp_path / "new")
    found = Vocabulary.read(target)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config["vocab_size"] == found.size and config["eos_token_id"] == config["pad_token_id"] == found.roles["eos"]
    assert config["bos_token_id"] is None


def test_every_token_of_the_donor_says_the_bytes(tmp_path: Path) -> None:
    two = Vocabulary.read(bytes_folder(tmp_path / "bytes")), Vocabulary.read(spaces_folder(tmp_path / "spaces"))
    for donor, target in (two, two[::-1]):
        subtokens = map_subtokens(donor, target)
        for row, kind in enumerate(target.kinds):
            if kind != "special":
                assert donor.text_bytes(subtokens.of(row)) == target.bytes_of[row]
                copied = donor.by_bytes.get(target.bytes_of[row] or b"") is not None
                assert subtokens.origin[row] == (COPY if copied else MEAN)
    donor, target = two
    subtokens = map_subtokens(donor, target)
    how = {token: (ORIGINS[subtokens.origin[i]], subtokens.of(i)) for i, token in enumerate(target.tokens)}
    assert how["▁ab"] == ("copy", [donor.index["Ġab"]])
    assert how["a"] == how["<0x61>"] == ("copy", [donor.index["a"]])
    assert how["</s>"] == ("role", [donor.roles["eos"]])
    assert how["<|im_end|>"] == ("role", [donor.index["<|im_end|>"]])
    assert how["<odd>"] == ("text", [donor.index[character] for character in "<odd>"])
    assert how["<s>"] == ("role", [donor.roles["eos"]])  # the donor has no token of its own for it
    # A byte token prefers the same byte token, everything else the normal one.
    own = map_subtokens(target, target)
    assert own.of(target.index["<0x61>"]) == [target.index["<0x61>"]]
    assert map_subtokens(target, donor).of(donor.index["a"]) == [target.index["a"]]
    report = describe_subtokens(subtokens, donor, target)
    assert report["duplicates"] == 4 and report["zeros"] == 0  # space, a, b and c stand beside their byte tokens
    assert report["not_utf8_alone"] == 128
    assert report["copies"] + report["means"] + report["roles"] + report["special_as_text"] == target.size
    specials = {entry["token"]: entry["how"] for entry in report["special_tokens"]}
    assert specials == {token: how[token][0] for token in ("<unk>", "<s>", "</s>", "<|im_end|>", "<odd>")}
    assert report["worst"][0]["token"] in ("<unk>", "<odd>") and len(report["worst"][0]["subtokens"]) == 5


def test_fill_in_and_turn_markers_meet_by_role(tmp_path: Path) -> None:
    sides = {
        "falcon": [">>PREFIX<<", ">>SUFFIX<<", ">>MIDDLE<<", "[INST]", "[/INST]"],
        "granite": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<|user|>", "<|assistant|>", "<reponame>"],
        "qwen": ["<|fim_middle|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|repo_name|>"],
    }
    found = {}
    for name, markers in sides.items():
        tokenizer = byte_level({})
        tokenizer.add_special_tokens([*markers, "<end>"])
        found[name] = Vocabulary.read(save(tokenizer, tmp_path / name, eos_token="<end>"))

    def twins(donor: str, target: str) -> dict[str, str]:
        ours, theirs = found[donor], found[target]
        report = describe_subtokens(map_subtokens(ours, theirs), ours, theirs)
        return {
            row["token"]: row["subtokens"][0]
            for row in report["special_tokens"]
            if row["how"] == "role" and row["token"] != "<end>"
        }

    three = {">>PREFIX<<": "<fim_prefix>", ">>SUFFIX<<": "<fim_suffix>", ">>MIDDLE<<": "<fim_middle>"}
    assert twins("granite", "falcon") == three | {"[INST]": "<|user|>", "[/INST]": "<|assistant|>"}
    assert twins("granite", "qwen") == {
        **{f"<|fim_{part}|>": f"<fim_{part}>" for part in ("prefix", "suffix", "middle")},
        "<|repo_name|>": "<reponame>",
    }


def test_messages_show_text_and_not_the_letters_of_bytes(tmp_path: Path) -> None:
    donor = Vocabulary.read(save(byte_level({}), tmp_path / "donor", eos_token="a"))
    target = Vocabulary.read(bytes_folder(tmp_path / "target"))
    report = describe_subtokens(map_subtokens(donor, target), donor, target)
    by_token = {row["token"]: row["subtokens"] for row in report["worst"]}
    assert by_token[" ab"] == [" ", "ab"]
    assert by_token["\\xe7\\x91"] == ["\\xe7", "\\x91"]  # no UTF-8 alone
    assert not any("Ġ" in token for token in by_token)
    # An override names a token by its text, or as tokenizer.json writes it.
    for name in (" ab", "Ġab"):
        of = map_subtokens(donor, target, {name: "b"}).of(target.index["Ġab"])
        assert of == [donor.index["b"]]
    with pytest.raises(DataError, match="not a token of the target") as raised:
        check_overrides(target, {" abc": "ab"})
    assert raised.value.hint == "did you mean ' ab'?"
    with pytest.raises(DataError, match="name the same token"):
        check_overrides(target, {" ab": "a", "Ġab": "b"})


def test_overrides(tmp_path: Path) -> None:
    donor = Vocabulary.read(bytes_folder(tmp_path / "bytes"))
    target = Vocabulary.read(spaces_folder(tmp_path / "spaces"))
    subtokens = map_subtokens(donor, target, {"<odd>": "<|im_start|>ab\n", "</s>": "<|im_end|>", "日": " ab"})
    of = {token: subtokens.of(number) for token, number in target.index.items()}
    assert of["<odd>"] == [donor.index["<|im_start|>"], donor.index["ab"], donor.index["Ċ"]]
    assert of["</s>"] == [donor.index["<|im_end|>"]] and of["日"] == [donor.index["Ġab"]]
    assert describe_subtokens(subtokens, donor, target)["overrides"] == 3
    # A SentencePiece donor puts a space before the first word; the override is written as it stands.
    back = map_subtokens(target, donor, {"<|im_start|>": "a<|im_end|>\nb<s>"})
    expected = [target.index[token] for token in ("a", "<|im_end|>", "<0x0A>", "b", "<s>")]
    assert back.of(donor.index["<|im_start|>"]) == expected
    with pytest.raises(DataError, match="is empty"):
        check_overrides(target, {"<odd>": ""})


def test_impossible_and_rare_bytes_are_counted(tmp_path: Path) -> None:
    lacking = NEVER_IN_UTF8 | {0x04, 0x1D, 0xF1}  # SmolLM2's vocabulary lacks these, too
    donor = Vocabulary.read(save(byte_level(without=lacking), tmp_path / "donor"))
    target = Vocabulary.read(bytes_folder(tmp_path / "target"))
    subtokens = map_subtokens(donor, target)
    assert {target.bytes_of[row] for row in subtokens.unwritable} == {bytes([byte]) for byte in lacking}
    assert describe_subtokens(subtokens, donor, target)["unwritable"] == 16
    assert donor.text_bytes(subtokens.of(target.index["ÿ"])) == "\ufffd".encode()


@pytest.mark.parametrize(
    ("target", "share", "duplicates"),
    [
        pytest.param("llama-3", 85.4, 0, marks=pytest.mark.slow),
        ("llama-2", 82.6, 96),
        pytest.param("deepseek-llm", 67.4, 0, marks=pytest.mark.slow),
        ("gpt-2", 84.0, 0),
    ],
)
def test_real_pairs(target: str, share: float, duplicates: int) -> None:
    donor, wanted = vocabulary("qwen2.5"), vocabulary(target)
    subtokens = map_subtokens(donor, wanted)
    report = describe_subtokens(subtokens, donor, wanted)
    assert round(100 * report["copies"] / wanted.size, 1) >= share
    assert report["zeros"] == 0 and report["unwritable"] == 0 and report["duplicates"] == duplicates
    for row in range(wanted.size):
        if wanted.kinds[row] != "special":
            assert donor.text_bytes(subtokens.of(row)) == wanted.bytes_of[row]
        else:
            assert subtokens.origin[row] != COPY


def test_sharded_donors_and_sharded_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    donor, target = model_folder(bytes_folder(tmp_path / "donor")), spaces_folder(tmp_path / "target")
    transplant(donor, target, tmp_path / "whole")
    sharded = bytes_folder(tmp_path / "sharded")
    AutoModelForCausalLM.from_pretrained(donor).save_pretrained(sharded, max_shard_size="20KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    monkeypatch.setattr("distill.surgery.vocabulary.SHARD_BYTES", 30_000)
    transplant(sharded, target, tmp_path / "split")
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    index = json.loads((tmp_path / "split" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected) and len(set(index["weight_map"].values())) > 2
    found = {n: t for file in (tmp_path / "split").glob("*.safetensors") for n, t in load_file(file).items()}
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(logits(tmp_path / "split"), logits(tmp_path / "whole"))


def test_what_is_refused_before_any_work(tmp_path: Path) -> None:
    donor, target = model_folder(bytes_folder(tmp_path / "donor")), spaces_folder(tmp_path / "target")
    check_transplant(donor, target, {"<odd>": "x"})

    def changed(name: str, **config: Any) -> Path:
        folder = shutil.copytree(donor, tmp_path / name)
        content = json.loads((folder / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(content))
        return folder

    other = changed("other", model_type="gpt_neox")
    narrow = changed("narrow", hidden_size=64)
    headless = changed("headless", tie_word_embeddings=False)
    byteless = changed("byteless")
    save(byte_level(without=frozenset({0x41})), byteless)
    larger = changed("larger")
    save(byte_level({f"word{i}": 257 + i for i in range(50)}), larger)
    cases = [
        (other, "gpt_neox"),
        (narrow, "by config.json"),
        (headless, "missing in the weights"),
        (byteless, "no token for 1 of the 256 bytes"),
        (larger, r"no row in the model, which has 268 \(vocab_size\): .word11. \(268\)"),
        (tmp_path / "nowhere", "does not exist"),
    ]
    for folder, reason in cases:
        with pytest.raises(DataError, match=reason):
            transplant(folder, target, tmp_path / "new")
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        transplant(donor, tmp_path / "nowhere", tmp_path / "new")
    with pytest.raises(DataError, match="not a token of the target"):
        check_transplant(donor, target, {"<strange>": "a"})
    with pytest.raises(DataError, match="int4"):
        transplant(donor, target, tmp_path / "new", dtype="int4")
    assert not (tmp_path / "new").exists()


def test_the_demo_donor_splits_text_as_it_was_trained_to() -> None:
    """It is a qwen2 model with GPT-2's way of splitting: AutoTokenizer must follow its tokenizer.json."""
    root = Path(__file__).resolve().parents[2] / "data"
    loaded = AutoTokenizer.from_pretrained(root / "demo-donor")
    own = Tokenizer.from_file(str(root / "demo-donor" / "tokenizer.json"))
    for path in sorted((root / "test").rglob("*.py"))[:6]:
        text = path.read_text(encoding="utf-8")
        assert loaded(text, add_special_tokens=False)["input_ids"] == own.encode(text, add_special_tokens=False).ids
