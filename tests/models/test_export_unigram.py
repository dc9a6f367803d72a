"""Unigram tokenizers in GGUF: the ids of Hugging Face in llama.cpp's `t5`, and what llama.cpp cannot do."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_export import HARD_TEXTS, build, held_out_texts, needs_llama
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from toys import replacements
from transformers import PreTrainedTokenizerFast

from distill.errors import DataError
from distill.export.parity import NASTY, PROSE, Source, compare, faults_of
from distill.models.conversion.llama_tokenizer import (
    PROBE,
    GgufTokenizer,
    Spacing,
    add_tokenizer,
    as_llama_reads,
    write_vocabulary,
)
from distill.models.conversion.pieces import unigram_pieces
from distill.models.conversion.tokenizer import read_tokenizer
from distill.models.conversion.writer import export_gguf
from distill.models.gguf.file import GgufFile

SPECIAL = ["<pad>", "</s>", "<unk>"]
# Without NUL, which llama.cpp's own vocabulary cannot hold.
TEXTS = [*PROBE, *NASTY, *HARD_TEXTS[2:5], *HARD_TEXTS[6:], PROSE, "a</s>b<pad>c"]


CHARSMAP = replacements({"\n": " ", "\r": " ", "\t": " ", "\f": " ", "`": "'"})


def precompiled(table: bytes) -> dict[str, Any]:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}


def steps(kind: str) -> tuple[Any, Any]:
    """The normaliser and the pre-tokenizer of a family of Unigram tokenizers."""
    always = pre_tokenizers.Metaspace(prepend_scheme="always")
    if kind == "t5":  # as older versions of transformers convert it
        return normalizers.Precompiled(CHARSMAP), pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), always])
    if kind == "t5 of transformers 5":
        spaces = normalizers.Replace(Regex(" {2,}"), "▁")
        stripped = normalizers.Strip(left=False, right=True)
        return normalizers.Sequence([stripped, normalizers.Precompiled(CHARSMAP), spaces]), always
    return None, pre_tokenizers.Metaspace(prepend_scheme=kind)


@functools.cache
def train(kind: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    normalizer, tokenizer.pre_tokenizer = steps(kind)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False, n_sub_iterations=1
    )
    texts = [*held_out_texts(("validation",))[::4], *TEXTS]
    tokenizer.train_from_iterator([text.replace("\0", "") for text in texts], trainer)
    tokenizer.decoder = decoders.Metaspace()
    content = json.loads(tokenizer.to_str())
    # SentencePiece's scores are floats of 32 bits; some characters of the texts get no token, and so <unk>.
    vocabulary = [(text, float(np.float32(score))) for text, score in content["model"]["vocab"]]
    content["model"]["vocab"] = [one for one in vocabulary if one[0] not in ("한", "😶", "Ⅷ", "ñ")]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)),
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


@needs_llama
@pytest.mark.parametrize(
    ("kind", "prefix", "merge"),
    [
        ("t5", True, True),
        ("t5 of transformers 5", True, True),
        ("always", True, False),
        ("first", True, False),
        ("never", False, False),
    ],
)
def test_ids_equal(kind: str, prefix: bool, merge: bool, tmp_path: Path) -> None:
    tokenizer = train(kind)
    tokenizer.save_pretrained(tmp_path)
    found = read_tokenizer(tmp_path, len(tokenizer) + 3, "llama")
    assert found.spacing is not None and found.spacing[:2] == (prefix, merge)
    assert found.model == "t5" and found.scores is not None and min(found.scores) == -10000.0
    assert (found.ids["unk"], found.ids["eos"], found.ids["pad"]) == (2, 1, 0)
    write_vocabulary(tmp_path / "v.gguf", lambda writer: add_tokenizer(writer, found))
    plain, file = tokenizer.backend_tokenizer, GgufFile(tmp_path / "v.gguf", vocabulary_only=True)
    texts = [text for text in [*TEXTS, *held_out_texts(("test",))[::4]] if text.strip()]
    if kind.startswith("t5"):  # wide spaces, which the table of a real model makes spaces
        texts = [text for text in texts if not set(text) & set("\u2028\u3000")]
    if kind == "first":  # the text after a special token: docs/export.md
        texts.remove("a</s>b<pad>c")
    with contextlib.closing(file):
        unknown = 0
        for text in texts:
            ids = plain.encode(text, add_special_tokens=False).ids
            unknown += 2 in ids
            assert file.tokenize(as_llama_reads(plain, text), parse_special=True) == ids, text
        assert unknown > 2
        back = file.detokenize(plain.encode("def f(x): return x", add_special_tokens=False).ids)
        assert back.removeprefix(b" ") == b"def f(x): return x"


@needs_llama
def test_a_decoder_with_unigram(tmp_path: Path) -> None:
    build("llama", tmp_path / "model", train("t5"))
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f16")
    parity = compare(Source.open(tmp_path / "model"), tmp_path / "m.gguf", [PROSE, *PROBE, *SPECIAL], 200)
    assert parity.tokenizer_mismatches == [] and faults_of(parity, "f16") == []


@needs_llama
def test_byte_fallback_is_refused_because_llama_cpp_has_none(tmp_path: Path) -> None:
    tokenizer = train("always")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["model"]["vocab"] += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
    content["model"]["byte_fallback"] = True
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="byte fallback"):
        unigram_pieces(path, content["model"])
    # What llama.cpp would make of it:
    kinds = {number: 6 if text.startswith("<0x") else 1 for number, (text, _) in enumerate(content["model"]["vocab"])}
    pieces = unigram_pieces(path, content["model"] | {"byte_fallback": False})
    listed = [piece._replace(kind=2 if number == 2 else kinds[number]) for number, piece in pieces.items()]

    found = GgufTokenizer(
        "t5",
        "default",
        [piece.text for piece in listed],
        [piece.kind for piece in listed],
        [piece.score for piece in listed],
        ids={"unk": 2},
        add_eos=True,
        spacing=Spacing(True, False, b""),
    )
    write_vocabulary(tmp_path / "v.gguf", lambda writer: add_tokenizer(writer, found))
    file = GgufFile(tmp_path / "v.gguf", vocabulary_only=True)
    with contextlib.closing(file):
        expected = Tokenizer.from_file(str(path)).encode("한", add_special_tokens=False).tokens
        assert expected == ["▁", "<0xED>", "<0x95>", "<0x9C>"]
        assert [listed[number].text for number in file.tokenize("한")] == ["▁", "<unk>"]


@needs_llama
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"pre_tokenizer": None}, "every treatment of spaces"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}}, "every treatment of spaces"),
        ({"model": {"unk_id": None}}, "without an unknown token"),
        ({"model": {"vocab": [["<pad>", 0.0], ["</s>", "x"], ["<unk>", 0.0]]}}, "cannot be loaded|no score|damaged"),
        ({"model": {"vocab": [["<pad>", 0.0], ["</s>", 0.0], ["<unk>", 0.0], ["a\0b", -1.0]]}}, "NUL"),
    ],
)
def test_unigram_that_cannot_be_exported(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    train("always").save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    for key, value in change.items():
        content[key] = {**content[key], **value} if key == "model" else value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=message):
        read_tokenizer(tmp_path, 500)


def test_a_damaged_table_of_replacements(tmp_path: Path) -> None:
    """llama.cpp would throw, or read past the table's end."""
    from distill.vocabulary.tokenizer_files import table_of

    path = tmp_path / "tokenizer.json"
    units = struct.unpack_from("<1024I", CHARSMAP, 4)
    outside = struct.pack("<1024I", 4000 << 10, *units[1:])  # the root's children
    child, leaf = 256 ^ ord("\n"), 512
    elsewhere = struct.pack("<1024I", *units[:leaf], 10**6, *units[leaf + 1 :])  # a replacement
    below = struct.pack("<1024I", *units[:child], (child ^ 1020) << 10 | 10, *units[child + 1 :])  # no leaf, no fault
    head, texts = CHARSMAP[:4], CHARSMAP[4 + 4096 :]
    assert units[child] & 256 and table_of(path, precompiled(head + below + texts))
    damaged = (b"\1", struct.pack("<I", 10**6) + b"abc", CHARSMAP[:100], struct.pack("<I", 2**31) + b"a" * 99)
    for table in (b"", *damaged, head + outside + texts, head + elsewhere + texts, CHARSMAP[:-1]):
        part = precompiled(table)
        if table:
            with pytest.raises(DataError, match="table of replacements"):
                table_of(path, part)
        else:
            assert table_of(path, part) == b""
    with pytest.raises(DataError, match="base64"):
        table_of(path, {"type": "Precompiled", "precompiled_charsmap": "é"})


def test_a_damaged_table_is_told_before_tokenizers_reads_it(tmp_path: Path) -> None:
    """tokenizers panics, or ends the process for want of memory."""
    from distill.models.hugging_face import load_tokenizer
    from distill.vocabulary import Vocabulary
    from distill.vocabulary.tokenizer_files import open_tokenizer

    train("t5").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    for table in (b"\0" * 9, struct.pack("<I", 10**9) + CHARSMAP[4:]):
        content["normalizer"] = {"type": "Sequence", "normalizers": [precompiled(table)]}
        path.write_text(json.dumps(content))
        for read in (lambda: open_tokenizer(path), lambda: load_tokenizer(str(tmp_path))):
            with pytest.raises(DataError, match="table of replacements"):
                read()
        with pytest.raises(DataError, match="table of replacements"):
            Vocabulary.read(tmp_path)
