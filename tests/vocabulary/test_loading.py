"""Tokenizers as folders have them: tokenizer.json decides on the ids, the settings on bos, the model on the rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import tokenizer_kinds
from tiny import Capture
from tokenizer_kinds import KINDS, TEXTS, byte_level, save, sentencepiece, with_bos
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from distill.data.chat_template import ChatTemplate
from distill.data.packing import pack
from distill.engines.loaded import encode_prompt
from distill.engines.pairs import VocabularyMetadata
from distill.engines.torch.hugging_face import encode, encode_text, load_tokenizer
from distill.errors import DataError
from distill.folders import copy_tokenizer
from distill.gguf.tokenizer import read_tokenizer
from distill.recipe import Chat
from distill.surgery.vocabulary import check_transplant
from distill.vocabulary.encoding import Encoder
from distill.vocabulary.vocabulary import Vocabulary, opening_of

CLASSES = ("LlamaTokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer", "GemmaTokenizer", "NoSuchTokenizer", None)
pytestmark = pytest.mark.usefixtures("one_thread")


def same_ids(theirs: Any, folder: Path) -> None:
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in TEXTS:
        assert encode(theirs, text) == ours.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_json_decides(kind: str, tmp_path: Path) -> None:
    """Whatever class the settings name; and in a folder that is written, for everybody's AutoTokenizer."""
    tokenizer = KINDS[kind]()
    for number, name in enumerate(CLASSES):
        for architecture in ("llama", "qwen2"):
            folder = save(tokenizer, tmp_path / f"{architecture}-{number}", architecture, tokenizer_class=name)
            same_ids(load_tokenizer(str(folder)), folder)
            (copy := tmp_path / f"{architecture}-{number}-copy").mkdir()
            (copy / "config.json").write_bytes((folder / "config.json").read_bytes())
            copy_tokenizer(folder, copy)
            same_ids(AutoTokenizer.from_pretrained(copy), folder)
            same_ids(load_tokenizer(str(copy)), folder)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek-llm", "llama-3", "qwen2.5")]


@pytest.mark.parametrize("name", ["gpt-2", "llama-2", *SLOW])
def test_real_tokenizers_decide(name: str, tmp_path: Path) -> None:
    source = tiny.real_tokenizer(name)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    stated = json.loads((source / "tokenizer_config.json").read_text())
    for place, named in enumerate((stated["tokenizer_class"], "LlamaTokenizer", "Qwen2Tokenizer")):
        folder = save(tokenizer, tmp_path / str(place), **{**stated, "tokenizer_class": named})
        same_ids(load_tokenizer(str(folder)), folder)


def test_the_settings_do_not_change_ids(tmp_path: Path) -> None:
    """Flags of added tokens, split_special_tokens, a dropout; a token that tokenizer.json lacks is added behind."""
    tokenizer = byte_level("gpt-2")
    tool = tokenizer.token_to_id("<tool>")
    flags = {"lstrip": True, "rstrip": True, "normalized": True, "special": True, "single_word": False}
    later = {str(tool): {"content": "<tool>", **flags}}
    size = tokenizer.get_vocab_size()
    folder = save(
        tokenizer, tmp_path, rows=size + 1, added_tokens_decoder=later, split_special_tokens=True, pad_token="<pad>"
    )
    found = load_tokenizer(str(folder))
    same_ids(found, folder)
    assert found.pad_token_id == size and encode(found, "<pad>") == [size]
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["dropout"] = 0.9
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert encode(load_tokenizer(str(folder)), TEXTS[0]) == encode(found, TEXTS[0])


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_every_kind(kind: str, tmp_path: Path) -> None:
    """The bytes of tokens are those of the text, and bytes become tokens that say them."""
    folder = save(KINDS[kind](), tmp_path)
    vocabulary, tokenizer = Vocabulary.read(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoder = Encoder(vocabulary)
    assert vocabulary.missing_bytes == [] and vocabulary.size == tokenizer.get_vocab_size()
    for text in TEXTS:
        if "NFC" not in kind and "<" not in text and "▁" not in text:
            written = vocabulary.text_bytes(tokenizer.encode(text, add_special_tokens=False).ids).decode()
            assert written in ({text, f" {text}"} if encoder.leads(True) else {text})
        data = text.encode()
        assert vocabulary.text_bytes(encoder.text(data)) == data
    assert {role: vocabulary.tokens[number] for role, number in vocabulary.roles.items() if role in ("bos", "eos")} == {
        "bos": "<s>",
        "eos": "<end>",
    }


def test_special_tokens_in_a_prompt_are_read_alike(gguf_toys: tuple[Path, Path]) -> None:
    file = gguf_toys[0]
    folder = file.with_suffix("")
    tokenizer = load_tokenizer(str(folder))
    text = f"one {tokenizer.eos_token} two"
    ids = encode_prompt(str(file), text)
    assert tokenizer.eos_token_id in ids and ids == encode_prompt(str(folder), text) == encode(tokenizer, text)


# ── bos ──


@pytest.mark.parametrize("build", [lambda: byte_level("llama-bpe"), lambda: sentencepiece("gemma")])
@pytest.mark.parametrize(
    ("processor", "stated", "begins"), [(1, None, 1), (0, None, 0), (0, 1, 1), (1, 0, 0), (1, 1, 1)]
)
def test_bos_by_the_files(build: Any, processor: int, stated: int | None, begins: int, tmp_path: Path) -> None:
    """add_bos_token where it is stated, else the post-processor, for ids, pairs, GGUF files and other vocabularies."""
    tokenizer = with_bos(build()) if processor else build()
    settings = {} if stated is None else {"add_bos_token": bool(stated)}
    folder = save(tokenizer, tmp_path, **settings)
    found, bos = load_tokenizer(str(folder)), [tokenizer.token_to_id("<s>")] * begins
    assert opening_of(found) == bos == Encoder(Vocabulary.read(folder)).opening
    plain = tokenizer.encode("one two", add_special_tokens=False).ids
    assert encode_text(found, "one two") == bos + plain and encode(found, "one two") == plain
    assert encode_text(found, "") == bos
    # A text that begins with bos has it once.
    assert encode_text(found, "<s>one two").count(tokenizer.token_to_id("<s>")) == 1
    if settings or processor:  # llama.cpp begins texts of SentencePiece with bos where no file says anything
        assert VocabularyMetadata.read(str(folder)).add_bos == bool(begins)
    assert read_tokenizer(folder, tokenizer.get_vocab_size()).add_bos == bool(begins)


@pytest.mark.parametrize("written", ["{{ bos_token }}", ""])
@pytest.mark.parametrize("asked", [True, False])
def test_chats_have_bos_once(written: str, asked: bool, tmp_path: Path) -> None:
    """The template's own, or the one that every text of the model begins with; never both."""
    template = written + "{% for m in messages %}<tool>{{ m['content'] }}<end>{% endfor %}"
    folder = save(byte_level("llama-bpe"), tmp_path, add_bos_token=asked, chat_template=template)
    tokenizer = load_tokenizer(str(folder))
    chat, bos = ChatTemplate(tokenizer, Chat()), tokenizer.bos_token_id
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for ids in (chat.prompt(messages[:1]), chat.answered(messages)[0]):
        assert ids.count(bos) == int(asked or bool(written)) and (bos not in ids or ids[0] == bos)
    assert bos not in chat.answered(messages)[1]


def test_every_part_of_a_long_text_begins_with_bos() -> None:
    """As llama.cpp measures perplexity: a model with bos is at a loss without. The scored tokens stay the same."""
    blocks = pack([([1, *range(10, 30)], 1)], 8, True, [1])
    assert [row.tolist() for row in blocks.ids] == [
        [1, *range(10, 17)],
        [1, *range(17, 24)],
        [1, *range(24, 30), blocks.ids[2, -1].item()],
    ]
    plain = pack([(list(range(10, 30)), 1)], 8, True)
    assert [row.nonzero()[:, 0].tolist() for row in blocks.mask] == [[*range(7)], [*range(1, 7)], [*range(1, 6)]]
    assert plain.ids[1].tolist() == list(range(18, 26))


# ── rows ──


@pytest.fixture(scope="module")
def rowless(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The world's target with two added tokens that its matrix has no rows for."""
    folder = tmp_path_factory.mktemp("rowless") / "target"
    shutil.copytree(world / "target", folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    fillers = [f"<filler{number}>" for number in range(rows - tokenizer.get_vocab_size())]
    tokenizer.add_tokens(fillers)
    tokenizer.add_special_tokens(["<observation>"])
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


COMMANDS: dict[str, list[str]] = {
    "check": ["check", "RECIPE", "TARGET"],
    "train": ["train", "RECIPE", "TARGET", "--runs", "RUNS"],
    "plan": ["plan", "RECIPE", "TARGET"],
    "generate": ["generate", "a", "BAD", "-C", "drafter=lookup"],
    "speedup": ["speedup", "BAD", "GOOD", "--prompts", "TEXT"],
    "speedup, the draft": ["speedup", "GOOD", "BAD", "--prompts", "TEXT"],
    "eval": ["eval", "GOOD", "BAD", "--kl", "--prompts", "TEXT"],
    "export": ["export-gguf", "BAD", "--outtype", "f16", "--to", "RUNS"],
    "transplant": ["transplant", "BAD", "GOOD", "RUNS"],
    "transplant, the target": ["transplant", "GOOD", "BAD", "RUNS"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_tokens_without_a_row_are_refused(
    command: str, rowless: Path, world: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "text.txt").write_text(tokenizer_kinds.TEXT * 40)
    places = {"RECIPE": world / "recipe.yaml", "TARGET": f"target.model={rowless}"}
    places |= {"BAD": rowless, "GOOD": world / "target", "TEXT": tmp_path / "text.txt", "RUNS": tmp_path / "runs"}
    said = tiny.refused(capsys, *(places.get(word, word) for word in COMMANDS[command]))
    assert "have no row in the model" in said and "'<observation>' (" in said and "'<extra>' (" in said
    assert not (tmp_path / "runs").exists() or not [*(tmp_path / "runs").rglob("*.safetensors")]


def test_special_tokens_behind_the_rows_are_left_out(world: Path, tmp_path: Path) -> None:
    """Gemma 3's text models keep the marker of an image, which has no row: it is text, in exports and transplants too.
    A token that texts hold is no such token."""
    tokenizer = byte_level("gpt-2")
    rows, marker = tokenizer.get_vocab_size(), "<image_soft_token>"
    tokenizer.add_special_tokens([marker])
    folder = save(tokenizer, tmp_path / "marked", rows=rows, image_token=marker)
    ids, vocabulary = encode(load_tokenizer(str(folder)), f"a {marker}"), Vocabulary.read(folder)
    assert max(ids) < rows and vocabulary.size == rows and vocabulary.text_bytes(ids) == f"a {marker}".encode()
    assert VocabularyMetadata.read(str(folder)).rowless == (marker,)
    exported = read_tokenizer(folder, rows)
    assert len(exported.tokens) == rows and marker not in exported.tokens
    plan = check_transplant(world / "target", folder)
    assert plan.rows == plan.target.size == rows
    plain = byte_level("gpt-2")
    plain.add_tokens(["<image>"])
    folder = save(plain, tmp_path / "plain", rows=rows)
    for read in (lambda: load_tokenizer(str(folder)), lambda: check_transplant(world / "target", folder)):
        with pytest.raises(DataError, match=r"no row in the model, .*'<image>'"):
            read()
