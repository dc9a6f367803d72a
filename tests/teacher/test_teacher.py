"""The teacher in its two kinds: its distributions are the target's own, and what rests on other things is refused."""

from __future__ import annotations

import copy
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import Patch
from torch import Tensor
from toys import save_toy, toy, toy_tokenizer
from transformers import Qwen2ForCausalLM

from distill.data.packing import pack
from distill.data.samples import SPLITS, Sample, write_samples
from distill.engines.torch.blocks import Packed, attention_mask, document_masks
from distill.engines.torch.hugging_face import load_model, quantisation
from distill.errors import DataError, RecipeError, RunError
from distill.files import write_json
from distill.recipe import Recipe, parse_recipe
from distill.run import Run
from distill.teacher.answers import answers
from distill.teacher.distributions import Head, LogitForm, TeacherChunk, logit_form, require_head
from distill.teacher.store import (
    ENTRY_BYTES,
    PACKED_BYTES,
    TAIL_BYTES,
    TeacherStore,
    bytes_per_row,
    exact_distributions,
    require_fit,
    teacher,
)
from distill.teacher.texts import split_blocks

torch.set_num_threads(1)

CPU = torch.device("cpu")
ROWS = 307  # of the models; the tokenizer has 300 tokens, the rest pads
TOKENS = 300
FORMS = {
    "qwen2": LogitForm(),
    "gemma2": LogitForm(1.0, 4.0),
    "granite": LogitForm(1 / 3.0),
    "cohere": LogitForm(0.25),
    "phi": LogitForm(),  # whose head has a bias
}
CAPS = {"final_logit_softcapping": 4.0, "attn_logit_softcapping": 3.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 5, "tie_word_embeddings": True, **CAPS},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.7},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
}


def target(kind: str) -> Any:
    """A random target of one architecture."""
    return toy(kind, vocabulary=ROWS, **SETTINGS.get(kind, {}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each target as a folder with a tokenizer of 300 tokens."""
    base, tokenizer = tmp_path_factory.mktemp("targets"), toy_tokenizer(TOKENS)
    assert len(tokenizer) <= TOKENS + 1 <= ROWS
    return {kind: save_toy(target(kind), tokenizer, base / kind) for kind in FORMS}


def text(count: int, seed: int) -> list[int]:
    return torch.randint(0, TOKENS, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def begin(folder: Path, model: Path, **settings: Any) -> tuple[Recipe, Run]:
    """A run whose corpus and answers are there: 12 answers and some text, packed into blocks of 24 positions."""
    compact = settings.get("kind", "compact") == "compact"
    recipe = parse_recipe(
        {
            "name": "made",
            "device": "cpu",
            "target": {"model": str(model), "dtype": "float32", **settings.pop("target", {})},
            "corpus": {"sources": [{"kind": "text", "path": str(folder)}], "block": 24},
            "answers": {"prompt_tokens": 8, "new_tokens": 12, "batch": 2, "group": 2},
            "teacher": {"shard_blocks": 2, "batch": 3, "top_k": 16} | ({"mass": None} if compact else {}) | settings,
        },
        "test",
    )
    run = Run(folder, recipe)
    samples = [
        Sample(str(n), text(2 + n % 5, n), text(3 + n % 8, 50 + n), dropped="looping" if n == 4 else "")
        for n in range(12)
    ]
    write_samples(run.path("answers", "train", "00000.arrow"), samples)
    write_json(run.path("answers", "manifest.json"), {"sampler": recipe.sampler.model_dump(mode="json")})
    run.path("corpus").mkdir(parents=True)
    pack([(text(31, 90), 1), (text(9, 91), 1)], 24, split_long=True).save(run.path("corpus", "text-train.safetensors"))
    for number, split in enumerate(("validation", "test")):
        held = [Sample(f"{split}-{n}", text(3, 20 + n + 9 * number), text(6, 30 + n)) for n in range(2)]
        write_samples(run.path("answers", split, "00000.arrow"), held)
        write_samples(run.path("corpus", f"prompts-{split}.arrow"), [replace(one, answer=[]) for one in held])
        given = pack([(text(20, 95 + number), 1)], 24, split_long=True)
        given.save(run.path("corpus", f"text-{split}.safetensors"))
    return recipe, run


def finish(run: Run, artifacts: list[Path]) -> None:
    run.finish("teacher", "key", {}, artifacts, time.time())


def made(folder: Path, model: Path, **settings: Any) -> tuple[Recipe, Run]:
    """The same with a finished teacher."""
    recipe, run = begin(folder, model, **settings)
    finish(run, teacher(recipe, run))
    return recipe, run


@torch.no_grad()
def own_distributions(model: Any, blocks: Packed) -> Tensor:
    """log p [N, V] in fp64 at the scored positions: the model in fp64, each document alone, without our masks."""
    exact, rows = copy.deepcopy(model).double(), []
    for block in range(len(blocks)):
        for document in range(int(blocks.documents[block].max()) + 1):
            here = blocks.documents[block] == document
            logits = exact(input_ids=blocks.ids[block][here].long().unsqueeze(0), use_cache=False).logits[0]
            scored = blocks.mask[block][here]
            rows.append((logits[scored][:, : len(toy_vocabulary())]).log_softmax(-1))
    return torch.cat(rows)


def toy_vocabulary() -> range:
    return range(max(toy_tokenizer(TOKENS).get_vocab().values()) + 1)


def spread(chunk: TeacherChunk, columns: int) -> Tensor:
    """log p [N, C] of a chunk that names every column but the tail's."""
    if chunk.ids is None:
        return chunk.log_probabilities
    logs = chunk.log_tail.unsqueeze(-1).expand(-1, columns + 1).clone()
    return logs.scatter(-1, chunk.ids, chunk.log_probabilities)[:, :columns]


@pytest.mark.parametrize("kind", ["compact", "exact"])
@pytest.mark.parametrize("architecture", FORMS)
def test_every_kind_gives_the_models_own_distributions(
    architecture: str, kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Whole and over kept tokens alone. A compact store holds all but one entry."""
    settings = {"top_k": 5000, "mass": None} if kind == "compact" else {}
    _, run = made(tmp_path, folders[architecture], kind=kind, **settings)
    source = TeacherStore(run)
    size = len(toy_vocabulary())
    assert source.vocabulary == size < ROWS
    index = torch.tensor([3, 0, 4])
    distributions = source.read(index).distributions(CPU)
    model = load_model(str(folders[architecture]), "float32", CPU)
    # fp16 holds log p with 11 bits: that of a token with p = e⁻¹⁶ is off by up to 2⁻⁷·½.
    close = {"rtol": 6e-4, "atol": 1e-4} if kind == "compact" else {"rtol": 1e-5, "atol": 3e-5}
    kept = torch.arange(1, size, 3)
    expected = own_distributions(model, source.packed.take(index))
    assert len(distributions) == len(expected) and distributions.columns == size
    halves = [distributions.chunk(rows) for rows in (slice(0, 7), slice(7, None))]
    assert all(part.log_probabilities.dtype == torch.float32 for part in halves)
    whole = torch.cat([spread(part, size) for part in halves])
    torch.testing.assert_close(whole.double(), expected, **close)
    trimmed = distributions.restrict(kept)
    chunk = trimmed.chunk(slice(None))
    assert trimmed.columns == len(kept)
    named = chunk.log_probabilities.double().exp().sum(-1)
    rest = expected.exp().sum(-1) - expected[:, kept].exp().sum(-1)
    if chunk.ids is not None:  # the one token that is not stored is in the tail, kept or not
        least = expected.min(-1).values.exp()
        assert bool(((chunk.log_tail.double().exp() - rest).abs() < least + 2e-3).all())
        gone = chunk.ids == len(kept)
        assert bool((chunk.log_probabilities[gone] == -torch.inf).all())
        rows, columns = (~gone).nonzero(as_tuple=True)
        found = chunk.log_probabilities[rows, columns].double()
        torch.testing.assert_close(found, expected[rows, kept[chunk.ids[rows, columns]]], **close)
    else:
        torch.testing.assert_close(chunk.log_probabilities.double(), expected[:, kept], **close)
        torch.testing.assert_close(chunk.log_tail.double().exp(), rest, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(named + chunk.log_tail.double().exp(), torch.ones_like(named), rtol=0, atol=2e-3)


@pytest.mark.parametrize("architecture", FORMS)
def test_logit_forms(architecture: str, folders: dict[str, Path]) -> None:
    model = load_model(str(folders[architecture]), "float32", CPU)
    assert logit_form(model.config) == FORMS[architecture]
    blocks = pack([(text(20, 7), 1)], 24, split_long=False)
    head = Head.of(model, TOKENS)
    require_head(model, head, blocks)
    wrong = Head(head.weight, head.bias, LogitForm(FORMS[architecture].scale * 1.01, FORMS[architecture].soft_cap))
    with pytest.raises(DataError, match=rf"{architecture}[\s\S]*differ by[\s\S]*kind: compact"):
        require_head(model, wrong, blocks)


class Louder(Qwen2ForCausalLM):
    """An architecture that does something after its head that no configuration key tells."""

    def forward(self, *arguments: Any, **named: Any) -> Any:
        output = super().forward(*arguments, **named)
        output.logits = output.logits + 0.5 * output.logits.roll(1, -1)
        return output


def test_an_unknown_step_after_the_head_is_refused(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    """By an exact store; a compact one stores its held-out distributions as their likeliest tokens, too."""
    model = Louder.from_pretrained(folders["qwen2"]).eval()
    monkeypatch.setattr("distill.teacher.store.load_target", lambda *_: model)
    recipe, run = begin(tmp_path / "exact", folders["qwen2"], kind="exact")
    with pytest.raises(DataError, match="cannot be computed from its last hidden states"):
        teacher(recipe, run)
    _, run = made(tmp_path / "compact", folders["qwen2"])
    for split in ("validation", "test"):
        store = TeacherStore(run, split)  # type: ignore[arg-type]
        assert not store.exact and store.manifest["entries"] == 16
        chunk = store.read(torch.tensor([0])).distributions(CPU).chunk(slice(None))
        blocks = store.packed.take(slice(0, 1))
        expected = own_distributions(model, blocks)
        assert chunk.ids is not None
        torch.testing.assert_close(
            chunk.log_probabilities.double(), expected.gather(1, chunk.ids), rtol=6e-4, atol=1e-4
        )


def test_a_trimmed_head_reads_an_exact_store_in_any_order(folders: dict[str, Path], tmp_path: Path) -> None:
    _, run = made(tmp_path / "run", folders["qwen2"], kind="exact")
    store, index, rows = TeacherStore(run), torch.tensor([2, 0, 1, 2]), slice(4, 30)
    kept = torch.arange(3, store.vocabulary, 5)
    found = store.read(index).distributions(CPU).restrict(kept).chunk(rows)
    fresh = TeacherStore(run)
    fresh.read(torch.tensor([1])).distributions(CPU).restrict(kept).chunk(slice(0, 1))
    again = fresh.read(index).distributions(CPU).restrict(kept).chunk(rows)
    assert torch.equal(again.log_probabilities, found.log_probabilities) and torch.equal(again.log_tail, found.log_tail)


def test_hidden_states_that_their_type_cannot_hold(folders: dict[str, Path], tmp_path: Path) -> None:
    model = load_model(str(folders["qwen2"]), "float32", CPU)
    with torch.no_grad():
        model.model.norm.weight.mul_(1e6)
    recipe, run = made(tmp_path, folders["qwen2"], kind="exact")
    blocks = split_blocks(recipe, run, "train").blocks.take(slice(None))
    assert exact_distributions(model, blocks, torch.float32)["hidden"].isfinite().all()
    with pytest.raises(DataError, match=r"not finite in float16[\s\S]*target\.dtype"):
        exact_distributions(model, blocks, torch.float16)


def test_entries_by_mass(folders: dict[str, Path], tmp_path: Path) -> None:
    """Each position has the fewest entries that hold the mass, by the model's own distributions; top_k is the cap, and
    the batch changes nothing."""
    recipe, run = made(tmp_path / "a", folders["qwen2"], top_k=200, mass=0.9)
    model, store = load_model(str(folders["qwen2"]), "float32", CPU), TeacherStore(run)
    blocks = split_blocks(recipe, run, "train").blocks.take(slice(None))
    expected = own_distributions(model, blocks)
    falling, order = expected.exp().sort(-1, descending=True)
    wanted = (falling.cumsum(-1) < 0.9).sum(-1) + 1
    found = torch.cat([shard["entries"] for shard in store._shards])
    assert torch.equal(found.long(), wanted.clamp(max=200)) and wanted.min() < wanted.max() < 200
    chunk = store.read(torch.arange(store.blocks)).distributions(CPU).chunk(slice(None))
    assert chunk.ids is not None
    for row, count in enumerate(wanted.tolist()):
        assert {*chunk.ids[row, :count].tolist()} == {*order[row, :count].tolist()}
        assert bool((chunk.ids[row, count:] == store.vocabulary).all())
    tails = 1 - falling.cumsum(-1).gather(1, (wanted - 1).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(chunk.log_tail.double().exp(), tails, rtol=1e-4, atol=1e-6)
    _, other = made(tmp_path / "b", folders["qwen2"], top_k=200, mass=0.9, batch=1)
    again = TeacherStore(other).read(torch.arange(store.blocks)).distributions(CPU).chunk(slice(None))
    assert again.ids is not None and torch.equal(again.ids, chunk.ids)
    _, run = made(tmp_path / "c", folders["qwen2"], top_k=3, mass=0.9)
    assert TeacherStore(run).manifest["entries"] == 3


def test_held_out_splits_are_stored_whole(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whatever the kind of the train store; the head is there once, and a store of another origin is made anew."""
    recipe, run = made(tmp_path, folders["qwen2"], top_k=5, mass=0.5)
    model = load_model(str(folders["qwen2"]), "float32", CPU)
    for split in ("validation", "test"):
        store = TeacherStore(run, split)  # type: ignore[arg-type]
        assert store.exact and store.answer_blocks == 1 and store.blocks == 2
        index = torch.arange(store.blocks)
        whole = store.read(index).distributions(CPU).chunk(slice(None)).log_probabilities
        expected = own_distributions(model, store.packed.take(index))
        torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=3e-5)
    assert [path.name for path in run.path("teacher").glob("*")].count("head.safetensors") == 1
    before = tiny.contents(run.path("teacher"))
    write_samples(run.path("answers", "test", "00000.arrow"), [Sample("test-0", text(3, 1), text(9, 2))])
    record = run.path("stages", "answers.json")
    run.finish("answers", "key", {}, [run.path("answers")], time.time())
    assert record.exists()
    finish(run, teacher(recipe, run))
    after = tiny.contents(run.path("teacher"))
    changed = {name for name in before if before[name] != after[name]}
    assert changed and {name.split("/")[0] for name in changed if "origin" not in name} == {"test"}


def test_resumes_by_the_shard(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe, run = begin(tmp_path, folders["qwen2"])
    teacher(recipe, run)
    before = tiny.contents(run.path("teacher"))
    shards = sorted(run.path("teacher", "train").glob("*.safetensors"))
    assert len(shards) == 4
    shards[0].unlink()
    stands = shards[2].stat().st_mtime_ns
    run.path("teacher", "train", "manifest.json").unlink()
    teacher(recipe, run)
    assert tiny.contents(run.path("teacher")) == before
    assert shards[2].stat().st_mtime_ns == stands


def test_a_store_that_was_made_otherwise_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe, run = made(tmp_path, folders["qwen2"])
    store = TeacherStore(run)
    require_fit(store.manifest, recipe)
    with pytest.raises(DataError, match=r"another tokenizer of .*qwen2[\s\S]*--redo teacher"):
        require_fit(store.manifest | {"tokenizer_digest": "of another revision"}, recipe)
    write_json(run.path("teacher", "train", "manifest.json"), store.manifest | {"format": 1})
    with pytest.raises(DataError, match=r"manifest\.json is damaged"):
        TeacherStore(run)


@pytest.mark.parametrize("name", ["train/shard-00001.safetensors", "head.safetensors"])
def test_a_damaged_file_is_refused(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    _, run = made(tmp_path, folders["qwen2"], kind="exact")
    path = run.path("teacher", name)
    written = path.stat().st_mtime_ns
    path.write_bytes(path.read_bytes()[:-1] + b"\x00\x01"[path.read_bytes()[-1] == 0 :][:1])
    with pytest.raises(DataError, match=rf"{name} is damaged[\s\S]*--verify"):
        TeacherStore(run)
    os.utime(path, ns=(written, written))  # nobody can tell it from the one that was written, without reading it whole
    TeacherStore(run)
    record = run.done("teacher")
    assert record is not None and not run.damaged_artifacts(record)
    run.whole = True
    assert [*run.damaged_artifacts(record)] == [f"teacher/{name}"]


@pytest.mark.parametrize("kind", ["compact", "exact"])
def test_processes_share_the_shards(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"kind": kind} | ({"mass": 0.8} if kind == "compact" else {})
    recipe, run = begin(tmp_path / "one", folders["qwen2"], **settings)
    teacher(recipe, run)
    wanted = tiny.contents(run.path("teacher"))
    recipe, run = begin(tmp_path / "three", folders["qwen2"], **settings)
    with pytest.raises(RunError, match="was not written by the process it was assigned to"):
        teacher(recipe, run, (0, 3))
    shards = lambda: {path.relative_to(run.folder).as_posix() for path in run.path("teacher").rglob("shard-*")}  # noqa: E731
    first = shards()
    teacher(recipe, run, (2, 3))
    third = shards() - first
    names = [f"teacher/train/shard-0000{n}.safetensors" for n in range(4)]
    names += [f"teacher/{split}/shard-00000.safetensors" for split in ("validation", "test")]
    assert first == {*names[::3]} and third == {*names[2::3]}
    teacher(recipe, run, (1, 3))
    assert not run.path("teacher", "train", "manifest.json").exists()
    teacher(recipe, run, (0, 3))
    assert tiny.contents(run.path("teacher")) == wanted
    # Two end with one shard lacking, and one process goes on.
    run.path("teacher", "train", "manifest.json").unlink()
    next(iter(run.path("teacher", "train").glob("shard-*3.safetensors"))).unlink()
    stands = {path: path.stat().st_mtime_ns for path in run.path("teacher").rglob("shard-*")}
    with pytest.raises(RunError, match="was not written by the process it was assigned to"):
        teacher(recipe, run, (0, 2))
    teacher(recipe, run)
    assert tiny.contents(run.path("teacher")) == wanted
    assert stands.items() <= {path: path.stat().st_mtime_ns for path in run.path("teacher").rglob("shard-*")}.items()
    with pytest.raises(RunError, match=r"7 processes were started, but there are 6 teacher shards"):
        teacher(recipe, run, (3, 7))


def test_processes_share_the_answers(folders: dict[str, Path], tmp_path: Path) -> None:
    def write(name: str) -> tuple[Recipe, Run]:
        recipe, run = begin(tmp_path / name, folders["qwen2"])
        shutil.rmtree(run.path("answers"))
        samples = [Sample(str(n), text(4 + n % 3, n)) for n in range(7)]
        write_samples(run.path("corpus", "prompts-train.arrow"), samples)
        return recipe, run

    recipe, run = write("one")
    answers(recipe, run)
    wanted = tiny.contents(run.path("answers"))
    assert len(wanted) == 4 + 2 + 3  # groups of the train split, of the others, and origins and the manifest
    recipe, run = write("two")
    answers(recipe, run, (0, 2))
    files = {path.relative_to(run.path("answers")).as_posix() for path in run.path("answers").rglob("*.arrow")}
    assert files == {"train/00000.arrow", "train/00002.arrow", "validation/00000.arrow"}
    answers(recipe, run, (1, 2))
    answers(recipe, run, (0, 2))
    assert tiny.contents(run.path("answers")) == wanted
    with pytest.raises(RunError, match=r"7 processes .* 6 groups of prompts[\s\S]*lower answers.group"):
        answers(recipe, run, (0, 7))


def test_the_sampler_is_that_of_the_answers(folders: dict[str, Path], tmp_path: Path) -> None:
    recipe, run = begin(tmp_path, folders["qwen2"])
    hot = recipe.sampler.model_copy(update={"temperature": 1.3}).model_dump(mode="json")
    write_json(run.path("answers", "manifest.json"), {"sampler": hot})
    finish(run, teacher(recipe, run))
    assert TeacherStore(run).manifest["sampler"] == hot


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kind": "exact", "mass": 0.9}, "mass is a setting of kind compact"),
        ({"mass": 1.0}, "input should be less than 1"),
        ({"gguf": "a.gguf", "kind": "exact"}, "gguf gives the entries of a compact store, but kind is exact"),
        ({"gguf": "a.gguf", "server": {"urls": ["http://a/v1"], "model": "m"}}, "two teachers"),
        ({"server": {"urls": [], "model": "m"}}, "urls"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=said):
        begin(tmp_path, tmp_path, **settings)


def test_quantised_and_sharded_targets(folders: dict[str, Path], monkeypatch: Patch) -> None:
    assert quantisation("int8", "bfloat16").load_in_8bit
    assert quantisation("int4", "bfloat16").bnb_4bit_compute_dtype == torch.bfloat16
    reference = str(folders["qwen2"])
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: False)
    with pytest.raises(RunError, match=r"int4 weights need the package bitsandbytes[\s\S]*pip install"):
        load_model(reference, "float32", CPU, quantise="int4")
    with pytest.raises(RunError, match=r"this run is on the CPU[\s\S]*target.shard"):
        load_model(reference, "float32", CPU, shard=True)
    monkeypatch.setattr("distill.engines.torch.hugging_face.process_count", lambda: 2)
    with pytest.raises(RunError, match="2 processes would each spread the target"):
        load_model(reference, "float32", torch.device("cuda"), shard=True)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.05), ("int4", 1.5)])
def test_a_quantised_target_gives_distributions(kind: str, most: float, tmp_path: Path) -> None:
    """bitsandbytes runs on a CPU too; where it is installed, the distributions are near those of the whole weights."""
    pytest.importorskip("bitsandbytes")
    model = toy("llama", vocabulary=ROWS, hidden_size=64, intermediate_size=128)  # 4-bit weights come 64 at a time
    folder = save_toy(model, toy_tokenizer(TOKENS), tmp_path / "llama")
    distributions = []
    for name, target in (("whole", {}), ("quantised", {"quantise": kind})):
        _, run = made(tmp_path / name, folder, kind="exact", target={"dtype": "bfloat16"} | target)
        distributions.append(
            TeacherStore(run).read(torch.arange(4)).distributions(CPU).chunk(slice(None)).log_probabilities
        )
    whole, quantised = distributions
    near, far = (float((whole.exp() * (whole - one)).sum(-1).mean()) for one in (quantised, quantised.roll(1, 0)))
    assert 1e-6 < near < most < far / 2  # far: at other positions


@pytest.mark.parametrize("settings", [{"top_k": 9}, {"kind": "exact"}])
def test_the_size_that_is_announced(settings: dict[str, Any], folders: dict[str, Path], tmp_path: Path) -> None:
    recipe, run = made(tmp_path, folders["qwen2"], shard_blocks=4, **settings)
    assert (ENTRY_BYTES, TAIL_BYTES) == (6, 8)
    for split in SPLITS:
        store = TeacherStore(run, split)
        each = bytes_per_row(recipe, split, 32)
        for number, blocks in enumerate(store.manifest["shard_blocks"]):
            rows = int(store._shards[number]["mask"].sum())
            taken = run.path("teacher", split, f"shard-{number:05d}.safetensors").stat().st_size
            assert 0 < taken - blocks * (24 * PACKED_BYTES + 16) - rows * each < 1000


def test_masks_of_mixed_layers() -> None:
    """A dictionary where layers differ, additive for eager attention, a window that counts the position itself."""
    model = target("gemma2")
    model.config._attn_implementation = "eager"  # its default in some versions of transformers
    documents = torch.tensor([[0] * 9 + [1] * 4 + [-1] * 2])
    masks = document_masks(model, documents)
    assert set(masks) == {"full_attention", "sliding_attention"}
    assert torch.equal(masks["full_attention"] == 0, attention_mask(documents))
    seen = masks["sliding_attention"][0, 0] == 0
    assert [seen[row].nonzero().flatten().tolist() for row in (8, 10)] == [[4, 5, 6, 7, 8], [9, 10]]
    assert document_masks(toy(), documents).dtype == torch.bool
    mistral = toy("mistral", sliding_window=3)
    assert document_masks(mistral, documents)[0, 0, 8].nonzero().flatten().tolist() == [6, 7, 8]
