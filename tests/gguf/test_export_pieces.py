"""SentencePiece tokenizers in GGUF: Hugging Face's ids in llama.cpp, with tokenizer.model and without, and back."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from test_export import HARD_TEXTS, held_out_texts
from test_gguf_reference import TOKENIZERS, needs_tokenizers, script
from test_import import check_ids, write_tokenizer
from tiny import needs_llama
from tokenizers import Tokenizer

from distill.errors import DataError
from distill.export import as_llama_reads, check_texts
from distill.gguf.library import GgufFile
from distill.gguf.tokenizer import NAMES, GgufTokenizer, add_tokenizer, read_pieces, read_tokenizer, write_vocabulary

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
        path.write_text(json.dumps(json.loads(path.read_text()) | LEGACY))
    found = read_tokenizer(folder, rows, "llama")
    imported = write_tokenizer(tmp_path / "v.gguf", found)
    tokenizer = Tokenizer.from_file(str(path))
    special = [token["content"] for token in json.loads(path.read_text())["added_tokens"]]
    texts = [*check_texts(folder), *HARD_TEXTS[2:6], HARD_TEXTS[7], *held_out_texts(("test",))[::4]]
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


@needs_tokenizers
def test_scores_without_the_file_keep_the_order_of_merges(tmp_path: Path) -> None:
    script.build_tokenizer("llama-2", TOKENIZERS, tmp_path)
    exact = read_tokenizer(tmp_path, 32000)
    (tmp_path / "tokenizer.model").unlink()
    found = read_tokenizer(tmp_path, 32000)
    assert found.tokens == exact.tokens and found.types == exact.types
    assert exact.scores is not None and found.scores is not None
    merged = [index for index in range(260, 20000) if exact.types[index] == 1 and exact.tokens[index].strip("▁")]
    assert sorted(merged, key=lambda index: -exact.scores[index]) == merged
    ranked = sorted(merged, key=lambda index: -found.scores[index])
    assert ranked == merged


@needs_tokenizers
def test_damaged_or_foreign_piece_files(tmp_path: Path) -> None:
    script.build_tokenizer("llama-2", TOKENIZERS, tmp_path)
    path = tmp_path / "tokenizer.model"
    data = path.read_bytes()
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    for damaged, message in (
        (data[:1000], "cut short"),
        (b"\x0f" + data, "no SentencePiece model"),
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
def test_texts_changed_in_other_ways(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    script.build_tokenizer("llama-2", TOKENIZERS, tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message):
        read_tokenizer(tmp_path, 32000)


@needs_llama
def test_every_probed_name_is_one_of_llama_cpp(tmp_path: Path) -> None:
    """A name that this build lacks would silently never be found."""
    missing = []
    for name in NAMES:
        write_vocabulary(
            tmp_path / "v.gguf",
            lambda writer, name=name: add_tokenizer(
                writer, GgufTokenizer("gpt2", name, ["a", "b", "ab"], [1, 1, 1], merges=["a b"])
            ),
        )
        try:
            GgufFile(tmp_path / "v.gguf", vocabulary_only=True).close()
        except DataError:
            missing.append(name)
    assert missing == []
