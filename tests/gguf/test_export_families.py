"""Families of models in GGUF that are refused, K-types, importance matrices, and the command."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from test_export import SIZES, build, held_out_texts, train_tokenizer
from test_hostile_files import with_number
from tiny import Capture, needs_llama
from transformers import PreTrainedTokenizerFast

from distill.errors import DataError
from distill.export import Source, compare, faults_of, importance_of
from distill.gguf.fields import read_shape
from distill.gguf.head import open_head
from distill.gguf.library import GgufFile
from distill.gguf.writer import export_files, export_gguf
from distill.recipe.measuring import OUTTYPES


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(size=512)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "experts": ("qwen2", {"num_experts": 8}, "mixture of experts"),
    "mixtral": ("qwen2", {"model_type": "mixtral"}, "mixture of experts"),
    "unknown": ("qwen2", {"model_type": "mamba"}, "supported: llama"),
    "images": ("qwen2", {"model_type": "gemma3", "text_config": {}}, "images"),
    "gemma scale": ("gemma2", {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar"),
    "gemma order": ("gemma3_text", {"layer_types": ["full_attention"] * 2}, "every n-th layer"),
    "gemma2 order": ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}, "every n-th layer"),
    "exaone4 windows": (
        "exaone4",
        {"sliding_window": 16, "layer_types": ["sliding_attention"] * 2},
        "models of 64 alone",
    ),
    "olmo2 head": ("olmo2", {"tie_word_embeddings": True}, "a tied head"),
    "cohere2 scale": ("cohere2", {"logit_scale": 0, "sliding_window": 8}, "logit_scale"),
    "ministral3 scale": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "mscale": 2.0,
                "mscale_all_dim": 1.0,
            }
        },
        "yarn with mscale",
    ),
    "smollm3 order": ("smollm3", {"no_rope_layers": [1, 0]}, "position-free"),
    "longrope": ("qwen2", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "longrope"),
    "partial rotation": ("qwen2", {"partial_rotary_factor": 0.5}, "8 of 16 dimensions"),
    "odd rotation": ("phi3", {"partial_rotary_factor": 0.95}, "15 of 16 dimensions"),
    "activation": ("gemma", {"hidden_activation": "relu"}, "relu"),
    "granite scale": ("granite", {"logits_scaling": 0}, "logits_scaling"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_llama_cpp_computes_otherwise(name: str, tmp_path: Path) -> None:
    kind, changes, message = REFUSED[name]
    config = SIZES | {"model_type": kind, "vocab_size": 100, "head_dim": 16, "query_pre_attn_scalar": 16} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError) as caught:
        read_shape(tmp_path)
    assert message in f"{caught.value} {caught.value.hint}"


def test_a_window_that_llama_cpp_leaves_out_is_told(tmp_path: Path) -> None:
    config = SIZES | {"model_type": "mistral", "vocab_size": 100, "sliding_window": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "beyond 64 tokens" in read_shape(tmp_path).notes[0]
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    assert read_shape(tmp_path).notes == ()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A qwen2 with rows of 256, which K-types divide."""
    folder = tmp_path_factory.mktemp("wide") / "model"
    wide = {"hidden_size": 256, "intermediate_size": 256, "initializer_range": 0.06}
    build("qwen2-untied", folder, tokenizer, **wide)
    return folder


# Types of one construction, by rising bits; iq4_xs and iq4_nl round weights to the same 16 values.
RISING = (
    ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k"),
    ("q3_k_l", "iq4_xs", "q5_k_s"),
    ("q3_k_l", "iq4_nl", "q5_k_s"),
    ("q4_0", "q5_0", "q8_0", "f16"),
    ("q4_1", "q5_1", "q8_0", "bf16", "f32"),
)


def kl_by_type(folder: Path, place: Path, texts: list[str], positions: int) -> dict[str, float]:
    """The KL of every type, each loaded in llama.cpp; all are written in one pass."""
    source, found = Source.open(folder), dict[str, float]()
    for report in export_files(folder, {place / f"{outtype}.gguf": outtype for outtype in OUTTYPES}):
        assert report.bytes == report.path.stat().st_size and report.fallback_tensors == 0
        parity = compare(source, report.path, texts, positions)
        assert faults_of(parity, report.outtype) == [], report.outtype
        assert parity.kl is not None
        found[report.outtype] = parity.kl
    assert {path.name for path in place.iterdir()} == {f"{outtype}.gguf" for outtype in OUTTYPES}
    return found


@needs_llama
def test_kl_falls_as_bits_rise(wide: Path, tmp_path: Path) -> None:
    """In two layers, the K-types of one number hardly differ."""
    found = kl_by_type(wide, tmp_path, [text[:800] for text in held_out_texts()[:2]], 200)
    for family in (("q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k"), *RISING[-2:]):
        values = [found[outtype] for outtype in family]
        assert values == sorted(values, reverse=True), (family, found)


@needs_llama
@pytest.mark.slow
def test_kl_of_the_demo_target_falls_as_bits_rise(tmp_path: Path) -> None:
    text = (tiny.ROOT / "data" / "test" / "chunk.py").read_text()
    found = kl_by_type(tiny.ROOT / "data" / "demo-target", tmp_path, [text], 512)
    assert {outtype for family in RISING for outtype in family} == set(OUTTYPES)
    for family in RISING:
        values = [found[outtype] for outtype in family]
        assert values == sorted(values, reverse=True), (family, found)


PARTS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
MATRIX = {f"blk.{layer}.{part}.weight": np.linspace(1, 500, 256) for layer in range(2) for part in PARTS}


def write_imatrix(path: Path, sums: dict[str, Any], calls: int = 10) -> None:
    """A matrix of the sums over so many calls, in the form of llama-imatrix that the file's name says."""
    if path.suffix == ".dat":
        entries = [
            struct.pack("<i", len(name.encode()))
            + name.encode()
            + struct.pack("<ii", calls, len(values))
            + values.astype("<f4").tobytes()
            for name, values in sums.items()
        ]
        path.write_bytes(struct.pack("<i", len(sums)) + b"".join(entries) + struct.pack("<ii", 4, 5) + b"a.txt")
        return
    writer = gguf.GGUFWriter(path, "imatrix")
    for name, values in sums.items():
        writer.add_tensor(f"{name}.in_sum2", np.float32(values)[None])
        writer.add_tensor(f"{name}.counts", np.full((1, 1), calls, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_an_importance_matrix_is_the_models_own(form: str, wide: Path, tmp_path: Path, capsys: Capture) -> None:
    """Read in both forms of llama-imatrix by value; refused where llama.cpp would ignore it, or a part of it."""
    path = tmp_path / f"imatrix.{form}"
    write_imatrix(path, MATRIX | {"output.weight": np.full(256, 20.0)})
    found = importance_of(path, wide)
    assert found.keys() == {*MATRIX, "output.weight"} and set(found["output.weight"]) == {2}
    assert all((found[name] == np.float32(MATRIX[name]) / np.float32(10)).all() for name in MATRIX)
    one = "blk.1.ffn_down.weight"
    for matrix, calls, message in (
        (
            {name: values for name, values in MATRIX.items() if name != one},
            10,
            f"nothing for 1 of its tensors, first {one}",
        ),
        (MATRIX | {"blk.2.attn_q.weight": MATRIX[one]}, 10, "for 1 tensors that it lacks, first blk.2.attn_q.weight"),
        ({"blk.0.ssm_in.weight": MATRIX[one]}, 10, "nothing for 14 .* and is for 1 tensors"),
        (MATRIX | {one: MATRIX[one][:192]}, 10, f"{one} has 192 columns, not 256"),
        (MATRIX | {one: -MATRIX[one]}, 10, f"{one} holds values that are no mean squares"),
        (MATRIX | {one: MATRIX[one] * np.nan}, 10, f"{one} holds values that are no mean squares"),
        ({}, 10, "importance matrix"),
    ):
        write_imatrix(path, matrix, calls)
        with pytest.raises(DataError, match=message):
            importance_of(path, wide)
    write_imatrix(path, MATRIX)
    assert tiny.call("export-gguf", wide, "--to", tmp_path / "out", "--imatrix", path) == 2
    assert "--imatrix changes nothing in f16 and q8_0" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-3000])
    arguments = ("export-gguf", wide, "--to", tmp_path / "out", "--outtype", "q2_k", "--imatrix", path)
    assert "imatrix" in tiny.refused(capsys, *arguments) and not (tmp_path / "out").exists()


@needs_llama
def test_type_of_single_tensors_and_importance(wide: Path, tmp_path: Path) -> None:
    write_imatrix(tmp_path / "imatrix.gguf", MATRIX)
    importance = importance_of(tmp_path / "imatrix.gguf", wide)
    assert importance["blk.0.attn_q.weight"][-1] == 50
    files = {}
    for name, options in {
        "plain": {},
        "head": {"tensor_types": (("token_embd", "q8_0"),)},
        "weighed": {"importance": importance},
    }.items():
        export_files(wide, {tmp_path / f"{name}.gguf": "q4_k_m"}, **options)
        files[name] = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / f"{name}.gguf").tensors}
    assert files["plain"]["blk.0.attn_q.weight"].tensor_type.name == "Q4_K"
    assert files["head"]["token_embd.weight"].tensor_type.name == "Q8_0"
    assert files["plain"]["token_embd.weight"].tensor_type.name != "Q8_0"
    assert (files["plain"]["blk.0.attn_q.weight"].data != files["weighed"]["blk.0.attn_q.weight"].data).any()
    with pytest.raises(DataError, match="q9"):
        export_files(wide, {tmp_path / "bad.gguf": "q4_k_m"}, tensor_types=(("token_embd", "q9"),))
    assert not [path for path in tmp_path.iterdir() if "bad" in path.name]
    with pytest.raises(DataError, match="importance"):
        importance_of(tmp_path / "plain.gguf", wide)


@pytest.mark.slow
@needs_llama
def test_importance_measured_on_a_text(tmp_path: Path) -> None:
    demo, kl = tiny.ROOT / "data" / "demo-target", []
    calibration = tmp_path / "calibration.txt"
    calibration.write_text("\n".join(held_out_texts(("validation",)))[:30_000], encoding="utf-8")
    for importance in (None, importance_of(calibration, demo)):
        export_files(demo, {tmp_path / "m.gguf": "q2_k"}, importance=importance)
        kl.append(compare(Source.open(demo), tmp_path / "m.gguf", held_out_texts(("test",))[:1], 400).kl)
    assert kl[1] < 0.9 * kl[0]
    for content, message in ((b"a", "too short"), (b"\xff", "not UTF-8")):
        calibration.write_bytes(content)
        with pytest.raises(DataError, match=message):
            importance_of(calibration, demo)
    with pytest.raises(DataError, match="cannot be read"):
        importance_of(tmp_path / "nowhere", demo)


@needs_llama
def test_command_checks_and_says_so(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: Capture) -> None:
    build("qwen2-untied", tmp_path / "model", tokenizer)
    arguments = ("export-gguf", tmp_path / "model", "--to", tmp_path / "out", "--outtype", "q4_k_m")
    line = tiny.shown(capsys, *arguments)
    assert "rows do not fit" in line and "0 of" in line and "KL" in line
    assert "exists already" in tiny.refused(capsys, *arguments)
    assert "not checked" in tiny.shown(capsys, *arguments, "--overwrite", "--no-check")
    # A file that is not its source's: the weights are changed between the writing and the check.
    from unittest import mock

    from distill.gguf import writer

    real = writer.export_files

    def other(*given: Any, **options: Any) -> Any:
        report = real(*given, **options)
        build("qwen2-untied", tmp_path / "model", tokenizer, initializer_range=0.3)
        return report

    with mock.patch.object(writer, "export_files", other):
        assert tiny.call(*arguments, "--overwrite") == 2
    assert "KL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("README.md", "---\nlicense: [\n---\n", "model card"),
        ("README.md", "---\nlicense: {a: b}\n---\n", "general.license"),
        ("README.md", "---\ntags: [1, 2]\n---\n", "general.tags"),
        ("README.md", "---\nbase_model: [{name: 5}]\n---\n", "general.base_model.0.name"),
        ("generation_config.json", '{"temperature": "hot"}', "general.sampling.temp"),
        ("generation_config.json", '{"top_k": 1e30}', "general.sampling.top_k"),
        ("generation_config.json", "[1]", "model card"),
        ("README.md", b"\xff\xfe", "model card"),
    ],
)
def test_model_cards_that_cannot_be_read(
    file: str, content: str | bytes, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    build("qwen2-untied", tmp_path / "model", tokenizer, num_hidden_layers=1)
    (tmp_path / "model" / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@needs_llama
@pytest.mark.parametrize("outtype", ["f16", "q4_k_m"])
def test_a_missing_shard_leaves_no_file(outtype: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = build("qwen2-untied", tmp_path / "model", tokenizer)
    (tmp_path / "model" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    shard = sorted((tmp_path / "model").glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(DataError, match=shard.name):
        export_gguf(tmp_path / "model", tmp_path / "m.gguf", outtype)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@needs_llama
def test_a_draft_is_held_against_its_target(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: Capture
) -> None:
    build("qwen2-untied", tmp_path / "model", tokenizer)
    build("qwen2-untied", tmp_path / "other", train_tokenizer(size=560))
    for name in ("model", "other"):
        export_gguf(tmp_path / name, tmp_path / f"{name}.gguf", "f16")
    arguments = ("export-gguf", tmp_path / "model", "--outtype", "bf16", "--no-check", "--to", tmp_path / "out")
    assert tiny.call(*arguments, "--target", tmp_path / "model.gguf") == 0
    draft = tmp_path / "out" / "model-bf16.gguf"
    assert f"llama-server -m {tmp_path / 'model.gguf'} -md {draft} --spec-type" in capsys.readouterr().out
    assert "does not fit" in tiny.refused(capsys, *arguments, "--overwrite", "--target", tmp_path / "other.gguf")


@needs_llama
@pytest.mark.parametrize(
    ("name", "key", "number"),
    [
        *((name, "rope.dimension_count", 8) for name in ("olmo2", "seed_oss", "ministral3")),
        *((name, "attention.key_length", 8) for name in ("olmo2", "cohere2")),
        *((name, "attention.sliding_window_pattern", 1) for name in ("gemma2", "gemma3", "cohere2")),
        ("glm4", "rope.dimension_count", 7),
    ],
)
def test_numbers_of_families_on_which_llama_cpp_aborts(
    name: str, key: str, number: int, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    build(name, tmp_path / "model", tokenizer)
    path = export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f16").path
    with_number(path, f"{open_head(path).architecture}.{key}", number)
    with pytest.raises(DataError, match=r"dimension_count|sliding_window_pattern|by its heads"):
        GgufFile(path)
