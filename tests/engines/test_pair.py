"""The pair rules against llama.cpp's own reading of the files, on vocabularies built here and on real ones."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import edit, needs_llama, real_tokenizer
from tokenizers import Tokenizer, models, processors
from toys import save_toy, toy, toy_tokenizer, write_gguf

from distill.engines.pairs import PairReport, VocabularyMetadata, compare_pair, distill_rule, require_pair
from distill.engines.torch.hugging_face import write_kept
from distill.errors import DataError, PairError
from distill.gguf.head import DEFAULTS, PRE_ADDS_BOS, PRE_WITHOUT_BOS
from distill.gguf.writer import export_gguf

# 256 byte tokens make these loadable as any kind of vocabulary; Ċ is what byte-level BPE needs of a line's end.
WORDS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "Ċ", "Ġ", "▁", "[UNK]", "ĠĊ"]


def write_file(path: Path, words: list[str] | None = None, kind: str = "gpt2", rows: int = 0, **keys: Any) -> str:
    """A GGUF file of a vocabulary, with so many rows of embeddings; a key given as None is left out."""
    import gguf
    import numpy

    words = WORDS if words is None else words
    settings: dict[str, Any] = {
        "context_length": 64,
        "tokenizer_model": kind,
        "tokenizer_pre": "gpt-2" if kind == "gpt2" else None,
        "token_list": words,
        "token_types": [1] * len(words),
        "token_scores": [0.0] * len(words),
        "token_merges": ["Ġ Ċ"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **keys,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in settings.items():
        if value is not None:
            getattr(writer, f"add_{key}")(value)
    if rows:
        writer.add_tensor("token_embd.weight", numpy.zeros((rows, 32), dtype=numpy.float32))
    write_gguf(writer)
    return str(path)


def changed(index: int, words: list[str] = WORDS) -> list[str]:
    return [*words[:index], "changed", *words[index + 1 :]]


def longer(count: int) -> list[str]:
    return [*WORDS, *(f"[PAD{len(WORDS) + i}]" for i in range(count))]


class Loaded:
    """A file's vocabulary as llama.cpp itself reads it."""

    def __init__(self, path: str) -> None:
        from distill.gguf.library import library

        llama = library()
        parameters = llama.llama_model_default_params()
        parameters.vocab_only = True
        model = llama.llama_model_load_from_file(path.encode(), parameters)
        assert model, path
        vocabulary = llama.llama_model_get_vocab(model)
        self.kind = next(
            name.removeprefix("LLAMA_VOCAB_TYPE_")
            for name in dir(llama)
            if name.startswith("LLAMA_VOCAB_TYPE_") and getattr(llama, name) == llama.llama_vocab_type(vocabulary)
        )
        self.tokens = [
            llama.llama_vocab_get_text(vocabulary, i).decode() for i in range(llama.llama_vocab_n_tokens(vocabulary))
        ]
        self.add_bos = bool(llama.llama_vocab_get_add_bos(vocabulary))
        self.add_eos = bool(llama.llama_vocab_get_add_eos(vocabulary))
        self.bos, self.eos = llama.llama_vocab_bos(vocabulary), llama.llama_vocab_eos(vocabulary)
        llama.llama_model_free(model)

    def same_as(self, metadata: VocabularyMetadata) -> bool:
        mine = (self.kind, self.tokens, self.add_bos, self.add_eos, self.bos, self.eos)
        none = [-1 if index is None else index for index in (metadata.bos, metadata.eos)]
        return mine == (metadata.kind, metadata.tokens, metadata.add_bos, metadata.add_eos, *none)


def llama_cpp_accepts(target: str, draft: str) -> bool:
    """The conditions of common_speculative_are_compatible, on what llama.cpp read."""
    ours, theirs = Loaded(target), Loaded(draft)
    return (
        ours.kind == theirs.kind
        and ours.add_bos == theirs.add_bos
        and (not ours.add_bos or ours.bos == theirs.bos)
        and ours.add_eos == theirs.add_eos
        and (not ours.add_eos or ours.eos == theirs.eos)
        and abs(len(ours.tokens) - len(theirs.tokens)) <= 128
        and all(a == b for a, b in list(zip(ours.tokens, theirs.tokens, strict=False))[5:])
    )


def fits(report: PairReport) -> tuple[bool, bool, bool, bool]:
    return tuple(verdict is None for verdict in (report.distill, report.llama_cpp, report.vllm, report.context))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of 290 tokens and 305 rows, and its GGUF file beside it."""
    folder = tmp_path_factory.mktemp("pair") / "model"
    tokenizer = toy_tokenizer()
    assert len(tokenizer) == 290
    save_toy(toy(vocabulary=305), tokenizer, folder)
    export_gguf(folder, folder.with_suffix(".gguf"), "f16")
    return folder


@pytest.fixture
def copied(model: Path, tmp_path: Path) -> Path:
    """A copy of the model without weights, for tests to change."""
    shutil.copytree(model, tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "copy"


def test_a_model_fits_its_own_file(model: Path) -> None:
    folder, file = str(model), str(model.with_suffix(".gguf"))
    for target, draft in ((folder, file), (file, folder), (folder, folder), (file, file)):
        report = compare_pair(target, draft)
        assert fits(report) == (True,) * 4, report
    ours, theirs = VocabularyMetadata.read(folder), VocabularyMetadata.read(file)
    assert ours == replace(theirs, reference=folder)
    assert (ours.rows, ours.real_tokens, ours.context, ours.architecture) == (305, 290, 160, "qwen2")
    assert [ours.real(index) for index in (290, 304, 305)] == [None] * 3
    assert ours.tokens[ours.eos or 0] == "<|endoftext|>" and not ours.chat_template


ADDED: dict[str, dict[str, Any]] = {f"other {end}": {f"add_{end}_token": True} for end in ("bos", "eos")}  # in both
# What differs in the draft's file; whether the rules of distill, llama.cpp and vLLM hold; words of the first reason.
CASES: dict[str, tuple[dict[str, Any], tuple[bool, bool, bool], str]] = {
    "nothing": ({}, (True, True, True), ""),
    "token 0": ({"words": changed(0)}, (False, True, True), "token 0 is '<unk>' in the target and 'changed' in the"),
    "token 3": ({"words": changed(3)}, (False, True, True), "token 3 is '<0x00>' in the target and 'changed' in the"),
    "token 4": ({"words": changed(4)}, (False, True, True), "token 4 is"),
    "token 5": ({"words": changed(5)}, (False, False, True), "token 5 is"),
    "token 7": ({"words": changed(7)}, (False, False, True), "token 7 is '<0x04>' in the target and 'changed' in the"),
    "two tokens": (
        {"words": changed(9, [*WORDS[:7], "other", *WORDS[8:]])},
        (False, False, True),
        "the first of 2 differences",
    ),
    "last": ({"words": changed(len(WORDS) - 1)}, (False, False, True), f"token {len(WORDS) - 1} is"),
    "128 more": ({"words": longer(128)}, (True, True, False), f"{len(WORDS)} in the target and {len(WORDS) + 128} in"),
    "129 more": ({"words": longer(129)}, (True, False, False), f"{len(WORDS)} and {len(WORDS) + 129} differ by more"),
    "one fewer": ({"words": WORDS[:-1]}, (False, True, False), f"{len(WORDS) - 1} is ' \\n' in the target and no"),
    "one more": ({"words": [*WORDS, "more"]}, (False, True, False), f"token {len(WORDS)} is no token in the target an"),
    "add_bos": ({"add_bos_token": True}, (True, False, True), "the draft adds its bos token to a text, but the target"),
    "add_eos": ({"add_eos_token": True}, (True, False, True), "the draft adds its eos token"),
    "other bos": ({"bos_token_id": 9}, (True, False, True), "bos token that is added is 1 in the target and 9 in the"),
    "other eos": ({"eos_token_id": 9}, (True, False, True), "eos token that is added is 2 in the target and 9 in the"),
    "ids that are not added": ({"bos_token_id": 9, "eos_token_id": 9}, (True, True, True), ""),
    "type": ({"kind": "llama", "add_bos_token": False}, (True, False, True), "has type BPE, the draft's SPM"),
}


@needs_llama
@pytest.mark.parametrize("name", CASES)
def test_rules_on_files(name: str, tmp_path: Path) -> None:
    changes, expected, words = CASES[name]
    both = ADDED.get(name, {})
    target = write_file(tmp_path / "target.gguf", **both)
    draft = write_file(tmp_path / "draft.gguf", **both, **changes)
    report = compare_pair(target, draft)
    assert fits(report)[:3] == expected and report.context is None
    assert words in " ".join(against.reason for against in (report.distill, report.llama_cpp, report.vllm) if against)
    assert llama_cpp_accepts(target, draft) == llama_cpp_accepts(draft, target) == expected[1]
    assert fits(compare_pair(draft, target))[:3] == expected
    for file in (target, draft):
        assert Loaded(file).same_as(VocabularyMetadata.read(file))


def sentencepiece(tokens: list[str]) -> VocabularyMetadata:
    return VocabularyMetadata("x", "llama", tokens, 0, 1, False, False, 64, "llama", chat_template=False)


def test_spaces_of_added_tokens_are_the_same_in_files_and_folders() -> None:
    """Converters write ▁▁ of Gemma's folder as two spaces."""
    folder, file = sentencepiece(["<s>", "</s>", "▁a", "▁▁"]), sentencepiece(["<s>", "</s>", "▁a", "  "])
    assert distill_rule(folder, file) is None and distill_rule(file, folder) is None
    other = distill_rule(folder, sentencepiece(["<s>", "</s>", "▁a", "   "]))
    assert other is not None and "token 3" in other[0]


@needs_llama
@pytest.mark.parametrize("kind", DEFAULTS)
def test_missing_keys_read_as_in_llama_cpp(kind: str, tmp_path: Path) -> None:
    for pre in (None, "gpt-2", "qwen2", "llama-bpe") if kind == "gpt2" else (None,):
        missing = dict.fromkeys(("bos_token_id", "eos_token_id", "context_length"))
        path = write_file(tmp_path / "a.gguf", kind=kind, tokenizer_pre=pre, **missing)
        metadata = VocabularyMetadata.read(path)
        assert Loaded(path).same_as(metadata), (kind, pre)
        assert metadata.context is None
        report = compare_pair(path, path)
        assert fits(report) == (True, True, True, False) and "names no context length" in str(report.context)


@needs_llama
def test_pre_tokenizers_that_change_the_defaults(tmp_path: Path) -> None:
    for pre in sorted(PRE_ADDS_BOS | PRE_WITHOUT_BOS | {"gpt-2", "smollm", "qwen35", "deepseek-llm"}):
        for flag in (None, False, True):
            path = write_file(tmp_path / "a.gguf", tokenizer_pre=pre, bos_token_id=None, add_bos_token=flag)
            assert Loaded(path).same_as(VocabularyMetadata.read(path)), (pre, flag)


@needs_llama
def test_ids_out_of_range_read_as_in_llama_cpp(tmp_path: Path) -> None:
    path = write_file(tmp_path / "a.gguf", bos_token_id=len(WORDS), eos_token_id=10**6)
    metadata = VocabularyMetadata.read(path)
    assert Loaded(path).same_as(metadata) and (metadata.bos, metadata.eos) == (11, 11)


def test_folders_with_other_padding(model: Path, copied: Path) -> None:
    edit(copied / "config.json", vocab_size=310)
    for draft in (str(model), str(model.with_suffix(".gguf"))):
        report = compare_pair(str(copied), draft)
        assert fits(report) == (True, True, False, True)
        assert report.vllm is not None and "310 rows" in report.vllm.remedy
        assert report.vllm.reason == "vocab_size is 310 in the target and 305 in the draft"
    edit(copied / "config.json", vocab_size=305 + 129)
    report = compare_pair(str(copied), str(model.with_suffix(".gguf")))
    assert fits(report) == (True, False, False, True)
    assert report.vllm is not None and "use_heterogeneous_vocab" in report.vllm.remedy
    assert report.llama_cpp is not None and "434 rows" in report.llama_cpp.remedy
    assert "use_heterogeneous_vocab" not in report.llama_cpp.remedy


@pytest.mark.parametrize(("index", "llama_cpp"), [(3, True), (7, False)])
def test_folder_with_a_changed_token(index: int, llama_cpp: bool, model: Path, copied: Path) -> None:
    content = json.loads((copied / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    old = next(token for token, number in vocabulary.items() if number == index)
    content["model"]["vocab"] = {"changed" if token == old else token: number for token, number in vocabulary.items()}
    content["model"]["merges"] = []
    (copied / "tokenizer.json").write_text(json.dumps(content))
    for target in (str(model), str(model.with_suffix(".gguf"))):
        report = compare_pair(target, str(copied))
        assert fits(report) == (False, llama_cpp, True, True)
        assert report.distill is not None
        assert report.distill.reason == f"token {index} is {old!r} in the target and 'changed' in the draft"
        with pytest.raises(PairError, match="does not fit the target") as raised:
            require_pair(target, str(copied))
        assert raised.value.hint is not None and "cut.transplant" in raised.value.hint


def test_report_as_text(model: Path, copied: Path) -> None:
    edit(copied / "config.json", vocab_size=310, max_position_embeddings=100)
    report = require_pair(str(model), str(copied))
    lines = report.lines()
    assert lines[0] == (
        f"target {model}: qwen2, BPE, 290 tokens in 305 rows, context 160, adds no bos or eos, no chat template"
    )
    assert lines[2:4] == ["pair rule of distill: fits", "pair rule of llama.cpp: fits"]
    assert lines[4] == "pair rule of vLLM: does not fit: vocab_size is 305 in the target and 310 in the draft"
    assert lines[5].startswith("  give the draft 305 rows") and len(lines) == 8
    assert lines[6] == "context: warning: the draft was made for 100 tokens, but 160 will be served"
    assert lines[7].startswith("  serve at most 100 tokens")
    assert compare_pair(str(copied), str(model.with_suffix(".gguf"))).context is None


def test_trimmed_heads_templates_and_tokens_without_rows(model: Path, copied: Path) -> None:
    write_kept(copied, [0, 5, 9], 305, {})
    (copied / "chat_template.jinja").write_text("{{ messages }}")
    report = compare_pair(str(model), str(copied))
    assert fits(report) == (True,) * 4 and report.draft.kept == 3 and report.draft.chat_template
    assert "trimmed to 3 tokens" in report.lines()[1] and report.lines()[1].count(" chat template") == 1
    edit(copied / "config.json", vocab_size=280)
    with pytest.raises(
        DataError, match=r"no row in the model, which has 280 \(vocab_size\): 'Ġret' \(280\), .* 5 more"
    ):
        compare_pair(str(model), str(copied))


def folder_with(tokenizer: Tokenizer, folder: Path, settings: dict[str, Any], config: dict[str, Any]) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 8, **config}))
    return folder


SMALL = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}


@pytest.mark.parametrize(
    ("model", "architecture", "kind", "add_bos"),
    [
        (models.BPE(SMALL, [], unk_token="<unk>"), "llama", "BPE", False),
        (models.BPE(SMALL, [], unk_token="<unk>", byte_fallback=True), "llama", "SPM", True),
    ],
)
def test_kinds_of_folders(model: Any, architecture: str, kind: str, add_bos: bool, tmp_path: Path) -> None:
    folder = folder_with(Tokenizer(model), tmp_path / "m", {}, {"model_type": architecture})
    metadata = VocabularyMetadata.read(str(folder))
    assert (metadata.kind, metadata.add_bos, metadata.add_eos) == (kind, add_bos, False)
    assert metadata.tokens == [*SMALL, "[PAD5]", "[PAD6]", "[PAD7]"]


def test_a_kind_that_llama_cpp_lacks(tmp_path: Path) -> None:
    folder = folder_with(Tokenizer(models.WordLevel(SMALL, unk_token="<unk>")), tmp_path / "m", {}, {})
    with pytest.raises(DataError, match="WordLevel"):
        VocabularyMetadata.read(str(folder))


NAMES: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}


@pytest.mark.parametrize("settings", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
@pytest.mark.parametrize(
    ("template", "names"),
    # The converter judges a template by the tokens that tokenizer_config.json names.
    [("$A", {}), ("$A", NAMES), ("<s> $A", NAMES), ("$A </s>", NAMES), ("<s> $A </s>", NAMES)],
)
def test_added_tokens_as_the_converter_writes_them(
    template: str, names: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    """Against gguf's SpecialVocab, which llama.cpp's converter uses; what it leaves out is llama.cpp's default."""
    import gguf

    tokenizer = Tokenizer(models.BPE(SMALL, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    folder = folder_with(tokenizer, tmp_path / "m", {**settings, **names}, {"bos_token_id": 1, "eos_token_id": 2})
    expected = gguf.SpecialVocab(folder)
    metadata = VocabularyMetadata.read(str(folder))
    assert (
        (metadata.bos, metadata.eos) == (expected.special_token_ids["bos"], expected.special_token_ids["eos"]) == (1, 2)
    )
    assert metadata.add_bos == expected.add_special_token.get("bos", False)
    assert metadata.add_eos == expected.add_special_token.get("eos", False)


def test_a_folder_without_tokenizer_json(model: Path, copied: Path) -> None:
    content = json.loads((copied / "tokenizer.json").read_text())["model"]
    (copied / "tokenizer.json").unlink()
    (copied / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (copied / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    edit(copied / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", eos_token="<|endoftext|>")
    (copied / "special_tokens_map.json").unlink(missing_ok=True)
    ours, theirs = VocabularyMetadata.read(str(model)), VocabularyMetadata.read(str(copied))
    vocabulary = {index: token for token, index in content["vocab"].items()}
    assert [theirs.tokens[index] for index in sorted(vocabulary)] == [vocabulary[index] for index in sorted(vocabulary)]
    assert theirs.kind == ours.kind == "BPE" and theirs.rows == 305


def test_hub_names_fetch_no_weights(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fnmatch

    asked: list[list[str]] = []

    def download(_name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    metadata = VocabularyMetadata.read("someone/something")
    assert metadata.reference == "someone/something" and metadata.tokens == VocabularyMetadata.read(str(model)).tokens
    wanted = {path.name for path in model.iterdir() if any(fnmatch.fnmatch(path.name, one) for one in asked[0])}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= wanted and "model.safetensors" not in wanted

    def offline(_name: str, allow_patterns: list[str]) -> str:
        raise OSError("no network\nat all")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(DataError, match="cannot load someone/something: no network") as raised:
        VocabularyMetadata.read("someone/something")
    assert raised.value.hint is not None and "network" in raised.value.hint


def test_other_files_are_refused(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    whole = model.with_suffix(".gguf").read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(DataError, match=words):
            VocabularyMetadata.read(str(path))

    refused("cannot be read")  # not there
    path.mkdir()
    refused("has no config.json")
    path.rmdir()
    for content, words in (
        (b"PK\x03\x04" + whole[4:], "not a GGUF file"),
        (whole[:4] + (1).to_bytes(4, "little") + whole[8:], "version 1"),
        (whole[:4] + (3).to_bytes(4, "big") + whole[8:], "big-endian"),
    ):
        path.write_bytes(content)
        refused(words)
    for changes, words in (
        ({"token_list": None}, "contains no tokenizer"),
        ({"tokenizer_model": None}, "contains no tokenizer"),
        ({"tokenizer_model": "of-my-own"}, "'of-my-own', which is unknown"),
        ({"token_list": WORDS[:-1], "rows": len(WORDS)}, f"names {len(WORDS) - 1} tokens, but embeds {len(WORDS)}"),
    ):
        write_file(path, **changes)
        refused(words)


def real(name: str, rows: int, folder: Path) -> str:
    shutil.copytree(real_tokenizer(name), folder / name)
    (folder / name / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": rows}))
    return str(folder / name)


def test_real_tokenizers(tmp_path: Path) -> None:
    llama_3, qwen = real("llama-3", 128_256, tmp_path), real("qwen2.5", 151_936, tmp_path)
    report = compare_pair(llama_3, qwen)
    # The first 256 are the bytes in both; read off the vocabularies independently.
    contents = [json.loads((Path(folder) / "tokenizer.json").read_text()) for folder in (llama_3, qwen)]
    ids = [{number: token for token, number in content["model"]["vocab"].items()} for content in contents]
    first = next(index for index in range(len(ids[0])) if ids[0][index] != ids[1][index])
    expected = f"token {first} is {ids[0][first]!r} in the target and {ids[1][first]!r} in the draft"
    assert first > 256 and report.distill is not None and report.distill.reason.startswith(expected)
    assert report.llama_cpp is not None and report.vllm is not None
    assert report.llama_cpp.reason == "the target adds its bos token to a text, but the draft does not"
    assert report.vllm.reason == "vocab_size is 128256 in the target and 151936 in the draft"
    assert (report.target.add_bos, report.target.bos) == (True, 128_000)
    assert report.draft.real_tokens < report.draft.rows == 151_936 and report.draft.chat_template
    assert report.target.real_tokens == 128_256
