"""GGUF files as others write them: token types, rotary embeddings, parts of a split file, types of other programs.

llama.cpp itself, on the files that are written here, says what is right.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from test_export import build, held_out_texts, some_ids, train_tokenizer
from test_import import cache
from test_tokenizers import check_ids, write_tokenizer
from tiny import needs_llama
from toys import write_gguf
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from distill.data.prompts import open_tokenizer
from distill.engines.llama_cpp.model import GgufModel
from distill.errors import DataError
from distill.export import Original, compare
from distill.files import is_gguf, reference_digest, split_parts
from distill.gguf.fields import configuration
from distill.gguf.head import END_NAMES, FILL_NAMES, NO_END, SHOWN_NAMES, open_head
from distill.gguf.importing import file_type, folder_of, read_import, rotary_factors, write_import
from distill.gguf.library import GgufFile, require_loadable
from distill.gguf.tokenizer import GgufTokenizer, add_tokenizer, imported_tokenizer, write_vocabulary
from distill.gguf.writer import export_gguf
from distill.recipe.recipe import resolve_model

assert cache  # each test has a cache of its own


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(size=512)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """Families of models as GGUF files."""
    place, found = tmp_path_factory.mktemp("files"), {}
    for name in ("qwen2-tied", "llama", "phi3-long", "llama-3-rope", "gemma3"):
        build(name, place / name / "model", tokenizer)
        found[name] = export_gguf(place / name / "model", place / f"{name}.gguf", "f32").path
    return found


def rewritten(
    source: Path,
    out: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Path:
    """A copy by the gguf package with other values of some keys and tensors (data, type); `options` are of
    gguf.GGUFWriter."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(source)
    writer = GGUFWriter(out, reader.fields["general.architecture"].contents(), **options)
    for key, field in reader.fields.items():
        if key not in values and not key.startswith("GGUF.") and key != "general.architecture":
            of_items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=of_items)
    for key, value in values.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    for tensor in reader.tensors:
        data, kind = tensors.get(tensor.name, (np.array(tensor.data), tensor.tensor_type))
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    write_gguf(writer)
    return out


# ── Tokens: types and ends are llama.cpp's, whatever the file says ──

COMBINED = [
    *(("<|return|>", "<|call|>", "<|end|>"), ("<|calls|>", "<|flush|>", "<|end|>"), ("<|call|>", "<|end|>")),
    *(("</s>", "<|tool_response>"), ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), ("<start_of_turn>", "<eom>")),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
]


def vocabulary(kind: str, names: Sequence[str], token_type: int) -> GgufTokenizer:
    """Letters, then these names, all of one type."""
    spaced = kind == "llama"
    others = [f"<0x{byte:02X}>" for byte in range(256)] if spaced else [*map(chr, range(33, 97)), "Ġ", "{", "|", "}"]
    tokens = ["<e>", *map(chr, range(97, 123)), *names, "ab", *others]
    types = [3, *[1] * 26, *[token_type] * len(names), 1, *[6 if spaced else 1] * len(others)]
    scores = [0.0] * len(tokens) if spaced else None
    merges = [] if spaced else ["a b"]
    return GgufTokenizer(kind, "default" if spaced else "qwen2", tokens, types, scores, merges, {"eos": 0})


@needs_llama
@pytest.mark.parametrize(("kind", "token_type"), [*itertools.product(("gpt2", "llama"), range(7))])
def test_types_ends_and_ids_are_those_of_llama_cpp(kind: str, token_type: int, tmp_path: Path) -> None:
    each = {*END_NAMES, *SHOWN_NAMES, *NO_END, "<|im_start|>", "<other>", *itertools.chain(*FILL_NAMES.values())}
    for names in [*((name,) for name in sorted(each)), *COMBINED] if token_type in (1, 4) else COMBINED:
        own = write_tokenizer(tmp_path / "v.gguf", vocabulary(kind, names, token_type))
        found = imported_tokenizer(open_head(tmp_path / "v.gguf"))
        with contextlib.closing(GgufFile(tmp_path / "v.gguf", vocabulary_only=True)) as file:
            llama = file.library
            ends = [one for one in range(file.head_rows) if llama.llama_vocab_is_eog(file.vocabulary, one)]
            control = [
                bool(llama.llama_vocab_get_attr(file.vocabulary, token) & llama.LLAMA_TOKEN_ATTR_CONTROL)
                for token in range(file.head_rows)
            ]
        assert sorted(found.ends) == ends and found.ends[0] == 0, names
        special = {token["content"]: token["special"] for token in found.content["added_tokens"]}
        if token_type in (1, 3, 4):
            assert [special.get(token, False) for token in found.tokens] == control, names
        check_ids(own, tmp_path / "v.gguf", ["a", "".join(f"x{name}ab" for name in names), f"{names[0]}{names[-1]}"])


@needs_llama
@pytest.mark.parametrize("token_type", [1, 4, 5])
def test_padding_rows_are_known_by_their_names(token_type: int, tmp_path: Path) -> None:
    """Converters once called them user-defined. As tokens they would make the distributions of a pair unequal."""
    whole = vocabulary("gpt2", (), 1)
    size = len(whole.tokens)
    padding = [f"[PAD{size + number}]" for number in range(3)]
    padded = {"tokens": [*whole.tokens, *padding], "types": [*whole.types, *[token_type] * 3]}
    write_tokenizer(tmp_path / "v.gguf", GgufTokenizer(**{**vars(whole), **padded}))
    with contextlib.closing(GgufFile(tmp_path / "v.gguf", vocabulary_only=True)) as file:
        assert file.head_rows == size + 3 and file._padding_rows() == 3
    found = imported_tokenizer(open_head(tmp_path / "v.gguf")).content
    named = {*found["model"]["vocab"], *(token["content"] for token in found["added_tokens"])}
    assert not named & {*padding} and "ab" in named


@needs_llama
def test_a_key_that_names_a_token_comes_before_its_name(tmp_path: Path) -> None:
    names = ("<PRE>", "<|fim_prefix|>", "<PAD>", "zz", "<turn>")
    exported = vocabulary("gpt2", names, 1)
    keys = {"fim_pre": 28, "fim_pad": 30, "eot": 31}
    own = write_tokenizer(tmp_path / "v.gguf", GgufTokenizer(**{**vars(exported), "ids": {**exported.ids, **keys}}))
    assert imported_tokenizer(open_head(tmp_path / "v.gguf")).ends == [0, 30, 31]
    check_ids(own, tmp_path / "v.gguf", ["a<PRE>b<|fim_prefix|>", "<PAD>zz<turn>"])


@needs_llama
def test_phi_3_takes_spaces_behind_its_markers_away(tmp_path: Path) -> None:
    """llama.cpp knows the model by its name."""
    exported = vocabulary("llama", ("<|user|>", "<|end|>", "<s>", "</s>", "<unk>", "<|endoftext|>", "▁"), 3)
    own = write_tokenizer(tmp_path / "v.gguf", exported)
    named = rewritten(
        tmp_path / "v.gguf", tmp_path / "n.gguf", {"general.name": "Phi-3 mini", "llama.context_length": 9}
    )
    texts = ["<|user|>  a b<|end|> \n c", "<s> a</s> a<|endoftext|> b"]
    found = imported_tokenizer(open_head(named))
    check_ids(own, tmp_path / "v.gguf", texts)
    check_ids(type(own).from_str(json.dumps(found.content)), named, texts)


def test_a_changed_type_is_said(files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    types = open_head(files["llama"]).numbers("tokenizer.ggml.token_type")
    data = np.array(types, dtype="<i4").tobytes()
    content = files["llama"].read_bytes()
    assert content.count(data) == 1
    (tmp_path / "m.gguf").write_bytes(content.replace(data, np.minimum(types, 1).astype("<i4").tobytes()))
    printed = tiny.shown(capsys, "import-gguf", tmp_path / "m.gguf", tmp_path / "out")
    assert "an answer ends with <|endoftext|>, <|im_end|>" in printed
    assert "llama.cpp treats these as special by name, against the file's types: <|endoftext|>, <|im_end|>" in printed


@needs_llama
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_equal_tokens_on_which_llama_cpp_aborts(kind: str, tmp_path: Path) -> None:
    """Named with their ids; empty ones, which llama.cpp names apart, are none."""
    path = tmp_path / "v.gguf"
    write_vocabulary(path, lambda writer: add_tokenizer(writer, vocabulary(kind, ("zz", "qq", "zz"), 1)))
    with pytest.raises(DataError, match=r"v\.gguf: its tokens 27 and 29 have the same text, 'zz'"):
        GgufFile(path, vocabulary_only=True)
    for names, fits in ((("", ""), True), (("", "[EMPTY_27]"), False), (("[EMPTY_27]", "zz"), True)):
        write_vocabulary(path, lambda writer, names=names: add_tokenizer(writer, vocabulary(kind, names, 1)))
        with contextlib.nullcontext() if fits else pytest.raises(DataError, match="tokens 27 and 28 have the same"):
            GgufFile(path, vocabulary_only=True).close()


@needs_llama
def test_a_named_template_is_for_requests_with_tools(tmp_path: Path) -> None:
    """As transformers has it for folders, and llama-server for files."""
    templates = {"default": "D {{ messages[0]['content'] }}", "tool_use": "T {{ tools | tojson }}"}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    write_tokenizer(path := tmp_path / "v.gguf", replace(vocabulary("gpt2", (), 1), chat_template=named))
    assert imported_tokenizer(open_head(path)).templates == templates
    with open_tokenizer(str(path)) as tokenizer:
        for tools, expected in ((None, "D hi"), ([], "D hi"), ([{"type": "function"}], 'T [{"type": "function"}]')):
            chat = {"tokenize": False, "add_generation_prompt": True, "tools": tools}
            assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], **chat) == expected


def test_a_file_is_known_by_its_content(files: dict[str, Path], tmp_path: Path) -> None:
    """Other programs' stores name files by their digest, and a hub's snapshot links names to such files."""
    (tmp_path / "blobs").mkdir()
    blob, upper, link = tmp_path / "blobs" / "sha256-99", tmp_path / "M.GGUF", tmp_path / "snapshot" / "m.gguf"
    link.parent.mkdir()
    for path in (blob, upper):
        shutil.copy(files["llama"], path)
    link.symlink_to("../blobs/sha256-99")
    for path in (blob, upper, link):
        assert resolve_model(str(path), tmp_path) == str(path) and is_gguf(str(path))
        assert tiny.call("check", path, files["llama"]) == 0 and folder_of(str(path)).is_dir()
    before, state = folder_of(str(upper), weights=False), upper.stat()
    (tmp_path / "other").write_bytes(files["llama"].read_bytes()[:-4] + bytes(4))  # other weights: size and head are as
    os.utime(tmp_path / "other", ns=(state.st_atime_ns, state.st_mtime_ns))  # they were, and so is the time
    os.replace(tmp_path / "other", upper)
    assert folder_of(str(upper), weights=False) != before and upper.stat().st_mtime_ns == state.st_mtime_ns
    (tmp_path / "folder.gguf").mkdir()
    for name in ("folder.gguf", "none", "blobs"):
        assert not is_gguf(str(tmp_path / name))
    assert is_gguf("absent.gguf") and not is_gguf("me/model-GGUF") and not is_gguf(__file__)


# ── Rotary embeddings: computed as llama.cpp computes them, or refused by name ──

YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
LINEAR = {"type": "linear", "factor": 4.0}
ROPES: list[tuple[str, dict[str, Any], str]] = [
    ("qwen2-tied", YARN, ""),
    ("qwen2-tied", YARN | {"attn_factor": 1.3}, ""),
    ("qwen2-tied", YARN | {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0, "yarn_ext_factor": -1.0}, ""),
    ("qwen2-tied", YARN | {"yarn_beta_fast": 8.0}, "yarn_beta_fast is 8.0, which llama.cpp ignores"),
    ("qwen2-tied", YARN | {"beta_slow": 2.0}, "beta_slow is 2.0"),
    ("qwen2-tied", YARN | {"yarn_attn_factor": 1.5}, "yarn_attn_factor is 1.5"),
    ("qwen2-tied", YARN | {"yarn_log_multiplier": 0.1}, "yarn_log_multiplier is 0.1"),
    ("qwen2-tied", {"alpha": 4.0}, "alpha is 4.0"),
    ("qwen2-tied", LINEAR, ""),
    ("qwen2-tied", {"factor": 4.0, "yarn_beta_fast": 8.0, "beta_slow": 2.0}, ""),
    ("qwen2-tied", LINEAR | {"factor": 0.0}, ""),
    ("qwen2-tied", LINEAR | {"type": "none"}, ""),
    ("qwen2-tied", LINEAR | {"attn_factor": 1.3}, "attn_factor 1.3 on rope scaling 'linear'"),
    ("qwen2-tied", {"attn_factor": 1.3}, "attn_factor 1.3 on rope scaling 'default'"),
    ("qwen2-tied", LINEAR | {"type": "longrope"}, "is longrope, but it has no rope_factors_long"),
    ("qwen2-tied", LINEAR | {"type": "dynamic"}, "scaling.type is b'dynamic', but must be one of none, linear"),
    ("llama", {}, ""),
    ("llama", YARN, "'yarn' on llama cannot be imported"),
    ("llama-3-rope", {}, ""),
    ("llama-3-rope", LINEAR, "twice, by rope_freqs.weight and by rope scaling 'linear'"),
    ("llama-3-rope", {"attn_factor": 1.3}, "attn_factor 1.3 on rope scaling 'llama3'"),
    ("phi3-long", {}, ""),
    ("phi3-long", {"attn_factor": 1.3}, ""),
    ("phi3-long", {"attn_factor": 1.0}, ""),
    ("phi3-long", YARN, "twice, by rope_factors_long.weight"),
    ("gemma3", LINEAR, ""),
]


@needs_llama
@pytest.mark.parametrize(("name", "values", "message"), ROPES)
def test_rotary_embedding(
    name: str, values: dict[str, Any], message: str, files: dict[str, Path], tmp_path: Path
) -> None:
    architecture = open_head(files[name]).architecture
    values = {f"{architecture}.rope.scaling.{key}": value for key, value in values.items()}
    path = rewritten(files[name], tmp_path / "m.gguf", values | {"general.name": "m"})
    if message:
        with pytest.raises(DataError, match=message):
            read_import(path)
        return
    write_import(read_import(path), tmp_path / "back")
    with GgufModel(path, context=256, threads=1) as model:
        ids = some_ids(model.vocabulary_size, 120)
        theirs = model.extend(ids).full().log_softmax(-1)
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "back")(torch.tensor([ids])).logits[0]
    own = logits[:, : theirs.shape[1]].log_softmax(-1)
    assert own.std() > 0.2  # far from flat
    assert (theirs.exp() * (theirs - own)).sum(-1).max() < 1e-3


@needs_llama
def test_settings_of_yarn_are_written_so_that_llama_cpp_reads_them_or_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
    for more in ({"beta_slow": 1}, {"attention_factor": 1.8, "beta_fast": 32}, {"attention_factor": 1}):
        folder, path = tmp_path / "m", tmp_path / "m.gguf"
        build("qwen2-tied", folder, tokenizer, rope_parameters=rope | more)
        export_gguf(folder, path, "f32")
        parity = compare(Original.open(folder), path, held_out_texts()[:1], 300)
        assert parity.kl < 1e-5, more
        found = read_import(path).config["rope_parameters"]
        assert found.get("attention_factor") == pytest.approx(more.get("attention_factor"))
    build("qwen2-tied", tmp_path / "m", tokenizer, rope_parameters=rope | {"beta_fast": 8})
    with pytest.raises(DataError, match=r"beta_fast 8.*llama\.cpp uses 32"):
        export_gguf(tmp_path / "m", tmp_path / "m.gguf", "f32")


# ── Split files ──


@pytest.fixture(params=[False, True], ids=["tensors in all", "metadata alone in the first"])
def parts(request: pytest.FixtureRequest, files: dict[str, Path], tmp_path: Path) -> list[Path]:
    """The llama split by the gguf package."""
    options = {"split_max_tensors": 8, "small_first_shard": request.param}
    (tmp_path / "p").mkdir()
    rewritten(files["llama"], tmp_path / "p" / "m.gguf", {}, **options)
    found = sorted((tmp_path / "p").iterdir())
    assert len(found) == (4 if request.param else 3) and found == split_parts(found[0])
    return found


@needs_llama
def test_a_split_file_is_the_whole_model(
    parts: list[Path], files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, first = files["llama"], parts[0]
    assert open_head(first).sizes == open_head(whole).sizes
    assert open_head(first).bytes == sum(part.stat().st_size for part in parts)
    assert file_type(first) == file_type(whole) and open_head(first).sizes == open_head(whole).sizes
    imports = [folder_of(str(path)) for path in (whole, first)]
    assert len({tiny.digest(folder / "model.safetensors") for folder in imports}) == 1
    assert (imports[0] / "tokenizer.json").read_bytes() == (imports[1] / "tokenizer.json").read_bytes()
    logits = []
    for path in (whole, first):
        with GgufModel(path, context=64, threads=1) as model:
            logits.append(model.extend([1, 2, 3]).full())
    assert torch.equal(*logits)
    assert tiny.call("check", first, whole) == 0
    assert tiny.call("import-gguf", first, tmp_path / "out") == 0
    # Content and cache know a change in any part.
    before, folder = reference_digest(str(first)), folder_of(str(first))
    data = bytearray(parts[-1].read_bytes())
    data[-1] ^= 1
    parts[-1].write_bytes(data)
    assert reference_digest(str(first)) != before and folder_of(str(first), weights=False) != folder


def test_parts_behind_links(parts: list[Path], files: dict[str, Path], tmp_path: Path) -> None:
    for number, part in enumerate(parts):
        part.rename(tmp_path / f"blob{number}")
        part.symlink_to(tmp_path / f"blob{number}")
    assert open_head(Path(resolve_model(str(parts[0]), tmp_path))).sizes == open_head(files["llama"]).sizes


@pytest.mark.parametrize("ending", ["part2of2", "split-b"])
def test_pieces_of_an_upload_are_to_be_joined(ending: str, files: dict[str, Path], tmp_path: Path) -> None:
    data, whole = files["llama"].read_bytes(), tmp_path / "m.gguf"
    for name, part in (("part1of2", data[:9000]), (ending, data[9000:])):
        path = whole.with_name(f"m.gguf.{name}")
        path.write_bytes(part)
        with pytest.raises(DataError, match=rf"is a piece of m\.gguf.*\n  join .*: cat {whole}\.\w+\* > {whole}"):
            folder_of(str(path))


def test_parts_that_do_not_make_up_a_model(parts: list[Path], files: dict[str, Path], tmp_path: Path) -> None:
    first, second, third, *_ = parts
    count = len(parts)

    def refused(message: str, path: Path = first) -> None:
        with pytest.raises(DataError, match=message):
            open_head(path)

    refused(f"it is part 2 of {count} of a model\n  give the first part, .*-00001-of-", second)
    shutil.copy(first, tmp_path / "alone.gguf")
    refused(f"one of {count} parts of a model, but its name does not say so", tmp_path / "alone.gguf")
    kept = {part: part.read_bytes() for part in parts}
    second.unlink()
    refused(f"1 of its {count} parts are missing, first {second.name}")
    with pytest.raises(DataError, match="parts are missing"):
        folder_of(str(first))
    second.write_bytes(kept[third])
    refused(f"{second.name}: its name says part 2 of {count}, its head says 2 ")
    third.write_bytes(kept[second])
    refused(f"{second.name}: its name says part 2 of {count}, its head says 2 ")
    first.write_bytes(kept[second])
    refused("its name says part 1 ")
    for part, data in kept.items():
        part.write_bytes(data)
    doubled = kept[third].replace(b"split.no" + bytes((2, 0, 0, 0, 2, 0)), b"split.no" + bytes((2, 0, 0, 0, 1, 0)))
    parts[-1].write_bytes(kept[parts[-1]][:-99])
    refused(f"{parts[-1].name} cannot be read as GGUF: it ends after")
    parts[-1].write_bytes(kept[parts[-1]])
    assert doubled != kept[third]
    second.write_bytes(doubled)
    refused(f"{third.name}: an earlier part also holds blk")
    second.write_bytes(kept[second])
    assert len(open_head(first).shapes) == len(open_head(files["llama"]).shapes)


# ── Types that nothing here knows, or few do ──


@needs_llama
def test_young_types_are_named(files: dict[str, Path], tmp_path: Path) -> None:
    """And so is a tensor whose numbers are damaged: it is no fault of a disk."""
    from gguf import GGMLQuantizationType as Kind

    def one(kind: Kind, row: int, value: int) -> Path:
        data = np.full((96, row), value, dtype=np.uint8)
        return rewritten(files["qwen2-tied"], tmp_path / "m.gguf", {}, {"blk.1.ffn_up.weight": (data, kind)})

    path = one(Kind.MXFP4, 34, 120)  # 64 values a row
    assert read_import(path).quantised == ["MXFP4"]
    GgufFile(path).close()
    with pytest.raises(
        DataError, match=r"blk\.1\.ffn_up\.weight, a tensor of mxfp4, holds values that are not numbers"
    ):
        GgufFile(one(Kind.MXFP4, 34, 255))
    with pytest.raises(DataError, match=r"blk\.1\.ffn_up\.weight is nvfp4, a type that keeps some scales"):
        read_import(one(Kind.NVFP4, 36, 9))


@pytest.mark.parametrize(("number", "name"), [(139, "type 139"), (7777, "type 7777")])
def test_a_type_that_nothing_here_loads(
    number: int, name: str, files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, title = files["qwen2-tied"].read_bytes(), b"blk.1.ffn_up.weight"
    place = content.index(title) + len(title) + 4 + 2 * 8  # behind the number of dimensions and both lengths
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:place] + number.to_bytes(4, "little") + content[place + 4 :])
    message = f"nothing here can load {name} (1 of 26 tensors, first blk.1.ffn_up.weight)"
    for arguments in (
        ("check", path, files["qwen2-tied"]),
        ("check", path, files["qwen2-tied"].with_suffix("") / "model"),
        ("import-gguf", path, tmp_path / "out"),
        ("speedup", path, files["qwen2-tied"], "--prompts", __file__),
    ):
        assert tiny.call(*arguments) == 2, arguments
        printed = capsys.readouterr()
        assert message in printed.err and "fits" not in printed.out
    assert open_head(path).sizes == open_head(files["qwen2-tied"]).sizes  # by the places of the tensors
    assert file_type(path) == "f32"


def test_types_that_do_not_fit_their_place(files: dict[str, Path], tmp_path: Path) -> None:
    """Types of other sizes than the places of the tensors, known to the gguf package or to llama.cpp alone (42)."""
    content, title = files["qwen2-tied"].read_bytes(), b"blk.1.ffn_up.weight"
    place = content.index(title) + len(title) + 4 + 2 * 8
    row = open_head(files["qwen2-tied"]).shapes[title.decode()][0]
    for number, name, block in (
        (39, "mxfp4", 32),
        (40, "nvfp4", 64),
        (41, "q1_0", 128),
        (42, "q2_0", 64),
        (1, "f16", 1),
    ):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content[:place] + number.to_bytes(4, "little") + content[place + 4 :])
        message = (
            f"blocks of {block} values do not fill rows" if row % block else rf"takes \d+ bytes as {name}, but blk"
        )
        with pytest.raises(DataError, match=message):
            require_loadable(open_head(path))


# ── The door: every key is read, harmless or refused ──


def opened(files: Mapping[str, Path], name: str, **values: Any) -> str:
    """The fault of a file with these values; empty where it is imported."""
    head = open_head(files[name])
    head.values |= values
    try:
        require_loadable(head)
        configuration(head, rotary_factors(head))
        imported_tokenizer(head)
    except DataError as error:
        return error.what
    return ""


def test_an_older_key_and_an_encoder(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    head = open_head(files["llama"])
    head.values["llama.rope.scale_linear"] = 2.0
    require_loadable(head)
    assert "scale_linear" not in capsys.readouterr().err
    head.values["llama.attention.causal"] = False
    with pytest.raises(DataError, match=r"attention\.causal is False, but must be true"):
        require_loadable(head)


@pytest.mark.parametrize("name", ["qwen2-tied", "llama", "phi3-long", "llama-3-rope", "gemma3"])
def test_every_key_of_a_file(name: str, files: dict[str, Path]) -> None:
    """Each key with a value of another kind; keys that nobody reads; and what says where a file comes from."""
    head = open_head(files[name])
    own = head.architecture
    assert opened(files, name) == ""
    for key, value in head.values.items():
        if key.startswith(("tokenizer.", f"{own}.")) or key in ("general.architecture", "general.type"):
            wrong = 3 if isinstance(value, bytes) else b"text"
            assert opened(files, name, **{key: wrong}), key
    for key in (f"{own}.attention.twist", f"{own}.swirl", f"{own}.rope.twist", "tokenizer.ggml.lowercase", "clip.has"):
        assert key in opened(files, name, **{key: 2}) and opened(files, name, **{key: 0}) == "", key
    for key, value in {
        "tokenizer.ggml.image_token_id": 3,
        f"{own}.vocab_size": 7,
        f"{own}.attention.causal": False,
        f"{own}.attention.scale": 0.5,
        f"{own}.attn_logit_softcapping": 30.0,
        f"{own}.embedding_length_out": 5,
        "gpt2.context_length": 512,
        "adapter.type": b"lora",
    }.items():
        assert key in opened(files, name, **{key: value}), key
    for kind in ("adapter", "mmproj", "imatrix"):
        assert "this file alone does not decode" in opened(files, name, **{"general.type": kind.encode()})
    provenance = {
        "general.quantized_by": b"me",
        "general.unheard": 3,
        "quantize.imatrix.file": b"x",
        "maker.note": b"x",
    }
    assert opened(files, name, **provenance) == "" and "architecture" in opened(
        files, name, **{"general.architecture": b"x"}
    )


def test_a_window_that_is_not_read(files: dict[str, Path]) -> None:
    """As files of Mistral's older models have it: no text reaches a window as long as the context."""
    context = open_head(files["llama"]).context
    assert "llama.attention.sliding_window is 8" in opened(files, "llama", **{"llama.attention.sliding_window": 8})
    assert opened(files, "llama", **{"llama.attention.sliding_window": context}) == ""
