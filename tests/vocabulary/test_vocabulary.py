"""The bytes of tokens: against what the tokenizers themselves make of any text, and by hand on small ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import real_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from distill.errors import DataError
from distill.vocabulary.vocabulary import BYTE_MAP, NEVER_IN_UTF8, Vocabulary, from_mapped, to_mapped

ROLES: dict[str, dict[str, str]] = {  # each kind once; the others take a second or two of reading each
    "gpt-2": {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
    "llama-2": {"bos": "<s>", "eos": "</s>", "unk": "<unk>"},
    "qwen2.5": {},
    "deepseek-llm": {},
    "llama-3": {
        "bos": "<|begin_of_text|>",
        "eos": "<|end_of_text|>",
        "turn_end": "<|eot_id|>",
        "turn_start": "<|start_header_id|>",
        "header_end": "<|end_header_id|>",
    },
}
SLOW = ("deepseek-llm", "llama-3")
REAL = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ROLES]
TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\t▁ÿĠ'0aZ日🙂"), max_size=60)


@cache
def loaded(name: str) -> tuple[Vocabulary, Tokenizer]:
    folder = real_tokenizer(name)
    return Vocabulary.read(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))


def as_normalised(tokenizer: Tokenizer, family: str, text: str) -> bytes:
    """What the tokenizer makes of a text without special tokens, by its own normaliser and pre-tokenizer."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if family == "byte-level":
        return text.encode()
    if tokenizer.pre_tokenizer is not None:  # Metaspace puts a space in front of the first word
        text = "".join(word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text))
    return text.replace("▁", " ").encode()


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", REAL)
def test_real_vocabularies(name: str) -> None:
    vocabulary, tokenizer = loaded(name)
    assert vocabulary.size == tokenizer.get_vocab_size() and None not in vocabulary.bytes_of
    assert vocabulary.missing_bytes == [] and len(vocabulary.byte_ids) == 256
    assert all(vocabulary.bytes_of[number] == bytes([byte]) for byte, number in vocabulary.byte_ids.items())
    assert set(vocabulary.kinds) <= {"normal", "special", "byte", "added"}
    roles = {role: vocabulary.tokens[number] for role, number in vocabulary.roles.items()}
    if name == "qwen2.5":
        assert roles["eos"] == roles["pad"] and roles["turn_end"] == "<|im_end|>"
    elif ROLES[name]:
        assert roles == ROLES[name]
    if name == "llama-2":
        assert vocabulary.kinds[:4] == ("special", "special", "special", "byte")
    named = [token.content for token in tokenizer.get_added_tokens_decoder().values()]

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(TEXT)
    def check(text: str) -> None:
        if any(token in text for token in named):
            return
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert vocabulary.text_bytes(ids) == as_normalised(tokenizer, vocabulary.family, text)

    check()


@given(st.binary(max_size=40))
def test_the_byte_map_goes_back(data: bytes) -> None:
    assert from_mapped(to_mapped(data)) == data
    assert len(set(BYTE_MAP)) == 256


def byte_level(extra: dict[str, int] | None = None, without: frozenset[int] = frozenset()) -> Tokenizer:
    words = [character for byte, character in enumerate(BYTE_MAP) if byte not in without] + ["ab"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary | (extra or {}), [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece(words: list[str], merges: list[tuple[str, str]], normalise: bool = True) -> Tokenizer:
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {word: number for number, word in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if normalise:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_added_tokens_raw_tokens_and_holes(tmp_path: Path) -> None:
    # A raw token with characters outside the byte map, a hole at 259, an added token inside and some beyond the model.
    tokenizer = byte_level({"<in>": 257, "日本": 258, "<far>": 260})
    tokenizer.add_special_tokens(["<far>"])
    tokenizer.add_tokens(["<in>", AddedToken("Ġplain", normalized=False), AddedToken("é x", normalized=False)])
    found = Vocabulary.read(save(tokenizer, tmp_path, eos_token={"content": "<far>"}))
    assert found.bytes_of[255:261] == (bytes([255]), b"ab", b"<in>", "日本".encode(), None, b"<far>")
    assert found.kinds[257:261] == ("added", "normal", "unused", "special")
    assert found.roles == {"eos": 260}
    assert [found.bytes_of[found.index[token]] for token in ("Ġplain", "é x")] == ["Ġplain".encode(), "é x".encode()]
    text = "ab é xĠplain<in>日"
    assert found.text_bytes(tokenizer.encode(text).ids) == text.encode()
    assert found.text_bytes([259, -1, 257, 9999]) == b"<in>"  # ids without a token
    assert found.by_bytes[b"ab"] == 256 and b"<far>" not in found.by_bytes


@pytest.mark.parametrize("normalise", [True, False])
def test_sentencepiece_by_hand(normalise: bool, tmp_path: Path) -> None:
    """Normalisers run apart on the pieces of text between added tokens."""
    tokenizer = sentencepiece(["▁", "a", "b", "A", "▁a", "▁▁"], [("▁", "a"), ("▁", "▁")], normalise)
    tokenizer.add_tokens([AddedToken("<x>", normalized=False), AddedToken("b<y>", normalized=True)])
    found = Vocabulary.read(save(tokenizer, tmp_path, bos_token="<s>", eos_token="</s>"))
    assert found.family == "sentencepiece" and found.roles["unk"] == 0
    capital = found.index["<0x41>"], found.index["A"]
    assert [found.bytes_of[number] for number in capital] == [b"A", b"A"] and found.by_bytes[b"A"] == capital[1]
    assert found.bytes_of[found.index["▁▁"]] == b"  "
    for text in ("a  b", "é a", " a", "▁b"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert found.text_bytes(ids) == as_normalised(tokenizer, "sentencepiece", text)
    ids = tokenizer.encode("a<x>a b<y>", add_special_tokens=False).ids
    # With a normaliser each part gets its space; with Metaspace the first alone.
    assert found.text_bytes(ids) == (b" a<x> a b<y>" if normalise else b" a<x>a b<y>")
    if normalise:
        ids = tokenizer.encode("b<y>", add_special_tokens=False).ids
        assert ids == [found.index["b<y>"]] and found.text_bytes(ids) == b" b<y>"


def test_byte_tokens_of_no_fallback(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({"<unk>": 0, "▁": 1, "h": 2, "i": 3, "<0x41>": 4}, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    found = Vocabulary.read(save(tokenizer, tmp_path))
    assert found.family == "sentencepiece" and found.roles == {"unk": 0} and found.kinds[0] == "special"
    assert found.text_bytes(tokenizer.encode("hi hi").ids) == b" hi hi"
    assert found.kinds[4] == "normal" and found.bytes_of[4] == b"<0x41>"  # nothing here decodes it to a byte
    assert len(found.missing_bytes) > 200


def test_names_that_transformers_adds(tmp_path: Path) -> None:
    """A role's token that tokenizer.json lacks gets the next id, as in transformers."""
    found = Vocabulary.read(save(byte_level(), tmp_path, eos_token="<end>", pad_token="<pad>"))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert found.size == len(theirs) == 259
    assert (found.roles["eos"], found.roles["pad"]) == (theirs.eos_token_id, theirs.pad_token_id)
    # An ordinary token that serves as padding stays one.
    other = Vocabulary.read(save(byte_level(), tmp_path / "other", pad_token="ab"))
    assert other.roles == {"pad": 256} and other.kinds[256] == "normal"


def test_bytes_that_are_missing(tmp_path: Path) -> None:
    impossible = Vocabulary.read(save(byte_level(without=NEVER_IN_UTF8), tmp_path / "impossible"))
    assert impossible.missing_bytes == [] and len(impossible.byte_ids) == 256 - 13
    named = byte_level(without=NEVER_IN_UTF8)
    named.add_tokens([BYTE_MAP[0xFF]])
    found = Vocabulary.read(save(named, tmp_path / "named"))
    assert found.bytes_of[found.byte_ids[0xFF]] == "ÿ".encode()  # text in its own right, and the byte's only token
    lacking = Vocabulary.read(save(byte_level(without=frozenset({0x80, 0x41})), tmp_path / "lacking"))
    assert lacking.missing_bytes == [0x41, 0x80]


def wrong_folders(folder: Path) -> Iterator[tuple[Path, str]]:
    yield folder / "none", "no tokenizer.json"
    pieces = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    yield save(pieces, folder / "wordpiece"), "WordPiece"
    yield save(Tokenizer(models.Unigram([("a", 0.0)], 0)), folder / "unigram"), "Unigram"
    yield save(Tokenizer(models.WordLevel({"a": 0}, "a")), folder / "wordlevel"), "WordLevel"
    yield save(Tokenizer(models.BPE({"a": 0}, [])), folder / "plain"), "neither bytes nor spaces"
    suffixed = Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>"))
    suffixed.pre_tokenizer = pre_tokenizers.ByteLevel()
    yield save(suffixed, folder / "suffixed"), "end_of_word_suffix"
    underscored = Tokenizer(models.BPE({"_": 0}, []))
    underscored.pre_tokenizer = pre_tokenizers.Metaspace(replacement="_")
    yield save(underscored, folder / "underscored"), "neither bytes nor spaces"
    (folder / "broken").mkdir()
    (folder / "broken" / "tokenizer.json").write_text('{"model": ')
    yield folder / "broken", "damaged"


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    for folder, reason in wrong_folders(tmp_path):
        with pytest.raises(DataError, match=reason) as raised:
            Vocabulary.read(folder)
        assert str(folder) in raised.value.what and raised.value.hint
