"""GGUF files imported as folders: tensors to the bit, ids of llama.cpp, logits of both engines, clear refusals."""

from __future__ import annotations

import itertools
import json
import shutil
import struct
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_export import FAMILIES, build, some_ids, train_tokenizer
from test_tokenizers import questions, smollm2
from tiny import Capture, Patch, needs_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from distill.cli import shared
from distill.engines.ends import target_ends
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.loaded import load_pair
from distill.engines.tokenizer import FileTokenizer
from distill.engines.torch import hugging_face
from distill.errors import DataError
from distill.export import Original, compare
from distill.gguf.head import END_NAMES, open_head
from distill.gguf.importing import folder_of, read_import, sources, write_import
from distill.gguf.writer import export_files, export_gguf
from distill.recipe import PyTorch, Target, load_recipe
from distill.recipe.measuring import DIRECT, OUTTYPES

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


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A file in f16, beside its folder `model`."""
    return export("llama", tmp_path_factory.mktemp("llama"), tokenizer, "f16")


def imported(path: Path, out: Path) -> dict[str, torch.Tensor]:
    write_import(read_import(path), out)
    return load_file(out / "model.safetensors")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for part in folder.glob("*.safetensors") for name, one in load_file(part).items()}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@needs_llama
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in FAMILIES),
        *itertools.product(("llama-biases", "gemma2", "phi3-long"), (torch.float16, torch.bfloat16)),
    ],
)
def test_every_family_goes_and_comes_back(
    name: str, dtype: torch.dtype, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """llama.cpp computes the logits of transformers; back come weights to the bit, and a config.json with which
    transformers computes the same."""
    outtype = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    model = build(name, tmp_path / "model", tokenizer, dtype=dtype)
    report = export_gguf(tmp_path / "model", tmp_path / "m.gguf", outtype)
    assert (report.bytes, report.fallback_tensors) == (report.path.stat().st_size, 0)
    if dtype == torch.float32:
        check_logits(name, model, report.path, tokenizer)
    if name == "exaone4-windows":
        return  # 64 layers take long
    before, after = weights(tmp_path / "model"), imported(tmp_path / "m.gguf", tmp_path / "back")
    assert before.keys() == after.keys()
    for tensor, one in before.items():
        shifted = name.startswith("gemma") and tensor.endswith("norm.weight")
        if shifted:  # the exporter adds one: digits below 2^-24 of it are gone
            assert (after[tensor].float() - one.float()).abs().max() <= 2**-23
        else:
            assert after[tensor].dtype == one.dtype, tensor
            assert torch.equal(bits(after[tensor]), bits(one)), tensor
    if dtype == torch.float32:
        ids = torch.tensor([some_ids(len(tokenizer), 90)])
        new = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager", dtype=dtype).eval()
        exact = not name.startswith("gemma") and model.config.model_type == new.config.model_type
        assert (model(ids).logits - new(ids).logits).abs().max() <= (0 if exact else 2e-4), new.config


def check_logits(name: str, model: Any, path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = some_ids(len(tokenizer), 200)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, :, : len(tokenizer)].log_softmax(-1)
    with GgufModel(path, context=200, threads=1) as gguf:
        assert gguf.file.head_rows == len(tokenizer) + 5 and gguf.vocabulary_size == len(tokenizer)
        actual = gguf.extend(ids).full().log_softmax(-1)
    # The f16 cache is the only rounding, but for GELU, which llama.cpp computes from an f16 table; a wrong permutation,
    # bias or norm gives differences above 0.1.
    exact = name.startswith(("llama", "qwen"))
    assert expected.std() > (0.5 if exact else 0.2)
    assert (actual - expected).abs().max() < (0.02 if exact else 0.05)
    assert (actual - expected).abs().mean() < (0.002 if exact else 0.004)


@pytest.fixture(scope="module")
def of_types(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> dict[str, Path]:
    """A llama whose rows K-types divide, as a file of every type."""
    folder = tmp_path_factory.mktemp("types")
    build("llama", folder / "model", tokenizer, hidden_size=256, intermediate_size=512, head_dim=64)
    files = {outtype: folder / f"{outtype}.gguf" for outtype in OUTTYPES}
    export_files(folder / "model", {path: outtype for outtype, path in files.items()})
    return files


@needs_llama
@pytest.mark.parametrize("outtype", OUTTYPES)
def test_every_type_is_dequantised_as_the_gguf_package_does(
    outtype: str, of_types: dict[str, Path], tmp_path: Path
) -> None:
    found = imported(of_types[outtype], tmp_path / "back")
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.1.attn_k.weight": "model.layers.1.self_attn.k_proj.weight",
    }
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(of_types[outtype]).tensors}
    kinds = set()
    for name, own in names.items():
        kinds.add(reader[name].tensor_type.name)
        expected = gguf.quants.dequantize(reader[name].data, reader[name].tensor_type).astype(np.float32)
        if "attn_k" in name:  # heads of 64: neighbours (0, 1) were (0, 32)
            expected = expected.reshape(2, 32, 2, 256).swapaxes(1, 2).reshape(128, 256)
        assert np.array_equal(found[own].float().numpy(), expected)
    assert outtype in DIRECT or any(kind[0] in "QI" for kind in kinds)


@needs_llama
@pytest.mark.parametrize("outtype", ["q4_k_m", "q3_k_m", "q8_0", "f16"])
def test_a_matrix_that_a_file_holds_twice_is_kept_once(
    outtype: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, capsys: Capture
) -> None:
    """Embedding and head of one matrix come back as the file's more precise one; of two matrices both do."""
    build("llama", tmp_path / "model", tokenizer, hidden_size=256, intermediate_size=256, head_dim=64)
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    for noise in (0.0, 0.5):
        one = tensors[embedding]
        tensors[head] = one + noise * one.std() * torch.randn(one.shape, generator=torch.Generator().manual_seed(0))
        save_file(tensors, path, {"format": "pt"})
        export_gguf(tmp_path / "model", tmp_path / "m.gguf", outtype)
        printed = tiny.shown(capsys, "import-gguf", tmp_path / "m.gguf", tmp_path / str(noise))
        found, reader = weights(tmp_path / str(noise)), gguf.GGUFReader(tmp_path / "m.gguf")
        theirs = {one.name: gguf.quants.dequantize(one.data, one.tensor_type) for one in reader.tensors}
        config = AutoConfig.from_pretrained(tmp_path / str(noise))
        assert config.tie_word_embeddings == (not noise) == (head not in found) == ("kept once" in printed)
        assert np.array_equal(
            found[embedding].float().numpy(), theirs["token_embd.weight" if noise else "output.weight"]
        )


def test_template_and_ends_come_back(tmp_path: Path, llama: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """The folder renders chats alike; the end of a turn ends an answer beside eos, because the template writes it."""
    write_import(read_import(llama), tmp_path / "back")
    old, new = (AutoTokenizer.from_pretrained(place) for place in (llama.with_name("model"), tmp_path / "back"))
    chat = [{"role": "user", "content": "Hi  there\n"}, {"role": "assistant", "content": "<|im_end|>"}]
    texts = [one.apply_chat_template(chat, tokenize=False) for one in (old, new)]
    assert texts[0] == texts[1] and "<|im_start|>user" in texts[0]
    assert old(texts[0])["input_ids"] == new(texts[0])["input_ids"]
    config = AutoConfig.from_pretrained(tmp_path / "back")
    ends = target_ends(str(tmp_path / "back"), new).ids
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


def test_the_cache_heals(cache: Path, llama: Path, of_types: dict[str, Path]) -> None:
    """A file of the folder that is damaged or gone is made again, the others stay as they are."""
    folder = folder_of(str(llama))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"} < before.keys()
    for name, content in before.items():
        for damage in (content[:-9], b"", None):
            (folder / name).unlink()
            if damage is not None:
                (folder / name).write_bytes(damage)
            assert folder_of(str(llama)) == folder
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, name
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert folder_of(str(llama), weights=False) == folder and not [*cache.glob("imported/*.*")]
    # Quantised weights take half the space: bfloat16 rounds them by less than their own types.
    path = of_types["q4_k_m"]
    stored, exact = weights(folder_of(str(path))), sources(open_head(path), read_import(path).config)
    for name, source in exact.items():
        values = torch.from_numpy(np.concatenate([*source.parts()]))
        assert stored[name].dtype == (torch.float32 if len(source.shape) == 1 else torch.bfloat16)
        assert torch.equal(stored[name].flatten(), values.to(stored[name].dtype).flatten()), name


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"qwen2", b"qwenX", "pre-tokenizer 'qwenX' is not known"),
        (b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama",
         b"general.architecture" + struct.pack("<IQ", 8, 5) + b"mamba", "architecture 'mamba' cannot be imported"),
        (b"blk.1.attn_q.weight", b"blk.1.attn_x.weight", "has no tensor for blk.1.attn_x.weight"),
        (b"blk.1.attn_q.weight", b"blk.7.attn_q.weight", "has no tensor for blk.7.attn_q.weight"),
        (b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4) + b"gpt2",
         b"tokenizer.ggml.model" + struct.pack("<IQ", 8, 4) + b"bert", "of the kind 'bert'"),
        (b"token_embd.weight", b"token_embx.weight", "no matrix token_embd.weight"),
        (b"blk.1.attn_q.weight" + struct.pack("<IQQI", 2, 64, 64, 1),
         b"blk.1.attn_q.weight" + struct.pack("<IQQI", 2, 64, 64, 10),
         "is q2_k, whose blocks of 256 values do not fill rows of 64"),
    ],
)  # fmt: skip
def test_what_is_unknown_is_refused_by_name(old: bytes, new: bytes, message: str, llama: Path, tmp_path: Path) -> None:
    data = llama.read_bytes()
    assert old in data
    (tmp_path / "x.gguf").write_bytes(data.replace(old, new, 1))
    with pytest.raises(DataError, match=message):
        read_import(tmp_path / "x.gguf")


def test_an_end_that_the_file_does_not_name_is_no_ordinary_token(llama: Path, tmp_path: Path) -> None:
    """llama.cpp takes token 11 of a BPE vocabulary, here as often a comma, for the end of every answer."""
    path, tokens = tmp_path / "x.gguf", read_import(llama).tokenizer.tokens
    content = llama.read_bytes()
    place = content.index(b"ggml.eos_token_id") + len(b"ggml.eos_token_id") + 4  # behind the type of its value
    unnamed = content[:place] + (2**32 - 1).to_bytes(4, "little") + content[place + 4 :]
    known = [number for number, token in enumerate(tokens) if token in END_NAMES]
    path.write_bytes(unnamed)
    with closing(GgufModel(path)) as model:
        assert known and FileTokenizer(model.file).ends == known and read_import(path).tokenizer.ends == known
    for number in known:
        unnamed = unnamed.replace(tokens[number].encode(), b"x" * len(tokens[number].encode()))
    path.write_bytes(unnamed)
    with pytest.raises(DataError, match="names no token that ends a text"):
        read_import(path)


def test_a_file_cut_short_leaves_no_folder(tmp_path: Path, cache: Path, llama: Path) -> None:
    data = llama.read_bytes()
    for size, words in (
        (len(data) - 500, f"it ends after {len(data) - 500} bytes, but needs"),
        (100, "inside its header"),
    ):
        (tmp_path / "m.gguf").write_bytes(data[:size])
        with pytest.raises(DataError, match=words):
            folder_of(str(tmp_path / "m.gguf"))
    assert not cache.exists() or not list(cache.rglob("config.json"))


QUICK = ("train.steps=2", "train.acceptance=null")


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
        assert tiny.call("train", recipe, "--runs", tmp_path / "of-folder", "--until", "train", *QUICK) == 0
    recipe = recipe_of_a_file(world, tmp_path)
    assert "tensors fit its metadata" in tiny.shown(capsys, "check", recipe)
    with tiny.one_thread():
        assert tiny.call("train", recipe, "--runs", tmp_path / "runs", *QUICK) == 0
    printed = capsys.readouterr()
    run = tmp_path / "runs" / "tiny"
    drafts = [place / "draft" / "model.safetensors" for place in (run, tmp_path / "of-folder" / "tiny")]
    assert tiny.digest(drafts[0]) == tiny.digest(drafts[1])
    files = json.loads((run / "gguf" / "export.json").read_text())["files"]
    found = {Path(file["path"]).name: file for file in files}
    assert {name: file["outtype"] for name, file in found.items()} == {"draft-f16.gguf": "f16", "served.gguf": "f32"}
    assert found["draft-f16.gguf"]["parity"]["kl"] < 1e-3, "the user's own file is the reference"
    assert found["served.gguf"]["parity"] is None and not found["served.gguf"]["faults"]
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
    alone = ("speedup.backends=[pytorch]", "export.outtypes=[]", *QUICK)
    with tiny.one_thread():
        assert tiny.call("train", recipe, "--runs", tmp_path / "runs", *alone) == 0, capsys.readouterr().err
    assert json.loads((tmp_path / "runs" / "tiny" / "gguf" / "export.json").read_text())["files"] == []
    capsys.readouterr()
    assert engine_on_other_prompts(tmp_path / "runs" / "tiny", world, capsys) == "pytorch"
    # The run's quantisation, devices and settings of PyTorch are those of its measurement on other prompts.
    loaded: list[Any] = []
    found = shared.find_run
    section = {"quantise": "int4", "shard": True}

    def changed(*given: Any) -> Any:
        recipe, run = found(*given)
        update = {"target": recipe.target.model_copy(update=section), "pytorch": PyTorch(draft_weights="int8")}
        return recipe.model_copy(update=update), run

    def measured(settings: Any, *_: Any, **__: Any) -> NoReturn:
        loaded.append(settings)
        raise DataError("int4 is not loaded here", "")

    monkeypatch.setattr(shared, "find_run", changed)
    monkeypatch.setattr("distill.api.measure_any_pair", measured)
    assert "not loaded here" in tiny.refused(capsys, "speedup", tmp_path / "runs" / "tiny", "--prompts", world)
    assert loaded[0].target.model_dump().items() >= section.items() and loaded[0].pytorch.draft_weights == "int8"
    assert (tmp_path / "runs" / "tiny" / "report.html").exists()


def test_a_large_file_answers_itself(world: Path, tmp_path: Path) -> None:
    """In llama.cpp: PyTorch's copy of it would take several times as much. A smaller one is imported."""
    values = tiny.recipe_values(world, elsewhere=True) | {"target": {"model": "./served.gguf"}}
    values["cut"] |= {"donor": "./donor"}
    with (tmp_path / "served.gguf").open("wb") as sparse:
        sparse.truncate(3_999_999_999)
    small = load_recipe(tiny.write_recipe(tmp_path / "recipe.yaml", values))
    assert small.answers.writer is None and small.teacher.gguf is None and small.target_runs_here
    with (tmp_path / "served.gguf").open("ab") as sparse:
        sparse.write(b"\0")
    recipe = load_recipe(tiny.write_recipe(tmp_path / "recipe.yaml", values))
    file = str(tmp_path / "served.gguf")
    assert recipe.answers.writer is not None and recipe.answers.writer.gguf == file == recipe.teacher.gguf
    assert not recipe.target_runs_here
    # Servers that run the file and write the answers give the distributions, too, if they write any.
    values["corpus"]["tokens"] = 0
    for written, teaches in ((12, True), (0, False)):
        values["answers"] |= {"prompts": written, "writer": {"urls": ["http://localhost:1"]}, "traffic": None}
        if not written:
            values["answers"]["traffic"] = "./served.gguf"
        served = load_recipe(tiny.write_recipe(tmp_path / "recipe.yaml", values))
        assert served.writer_teaches is teaches and (served.teacher.gguf is None) is teaches
        assert not served.target_runs_here
    del values["answers"]["writer"], values["answers"]["prompts"]
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


@needs_llama
@pytest.mark.slow
def test_logits_of_a_real_file(tmp_path: Path) -> None:
    """Computed in f32 the imported weights give llama.cpp's distributions; its own arithmetic of q4_1 differs more."""
    path = smollm2()
    folder = folder_of(str(path))
    export_gguf(folder, tmp_path / "f32.gguf", "f32")
    source = Original.open(folder)
    exact, served = (compare(source, one, questions(), 1000) for one in (tmp_path / "f32.gguf", path))
    assert exact.kl is not None and exact.kl < 1e-5 and exact.tokenizer_mismatches == []
    assert served.kl is not None and served.kl < 0.01
