"""Stage `cut` in whole runs: transplant, trim, sparsity, each by the command line on the tiny world."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from toys import save_toy, toy
from transformers import AutoModelForCausalLM, AutoTokenizer

from distill.data.samples import Sample, read_answers, write_samples
from distill.engines.torch.hugging_face import load_config, load_tokenizer
from distill.errors import DataError
from distill.gguf import families
from distill.gguf.families import kinds_of
from distill.gguf.writer import export_gguf
from distill.recipe import load_recipe
from distill.run import Run
from distill.surgery import cutter
from distill.surgery.cutter import TargetDistributions, choose_head, score_blocks
from distill.surgery.vocabulary import count_tokens
from distill.teacher.store import TeacherStore


@pytest.fixture(scope="module")
def begun(world: Path, ready: Path) -> Path:
    """A run of the world's recipe that has everything before the training, and a donor with another vocabulary."""
    if not (world / "donor").exists():
        tiny.build_model(world / "donor", layers=2, vocabulary=350, seeds=range(40, 60))
    return ready


def run_with(begun: Path, world: Path, tmp_path: Path, until: str, status: int = 0, **changes: Any) -> Path:
    """A copy of the begun run, gone on with other draft and train settings to this exit status; the run's folder."""
    values = copy.deepcopy(tiny.recipe_values(world))
    for section, value in changes.items():
        values[section] = values[section] | value
    # A recipe's paths start at its own folder.
    recipe = tiny.write_recipe(world / f"{tmp_path.name}.yaml", values)
    shutil.copytree(begun, tmp_path / "tiny")
    assert tiny.call("train", recipe, "--runs", tmp_path, "--until", until) == status
    return tmp_path / "tiny"


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()  # type: ignore[no-any-return]


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_transplanted_donor_becomes_a_draft(begun: Path, world: Path, tmp_path: Path) -> None:
    transplant = {"<|endoftext|>": "pass\n"}
    draft = {"donor": "./donor", "transplant": transplant, "layers": None, "mlp_width": None}
    run = run_with(begun, world, tmp_path, "eval", cut=draft, train={"acceptance": None})
    change = read(run / "cut" / "surgery.json")["changes"][0]
    assert change["operation"] == "transplant" and change["details"]["zeros"] == 0
    assert change["details"]["overrides"] == 1 and change["close_after"]["kl"] > 0
    for folder in (run / "cut", run / "draft"):
        tokenizer, target = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(world / "target")
        assert tokenizer.get_vocab() == target.get_vocab()
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.vocab_size == AutoModelForCausalLM.from_pretrained(world / "target").config.vocab_size
        assert model.config.eos_token_id == target.eos_token_id
    before, after = (state_of(run / name) for name in ("cut", "draft"))
    assert all(not torch.equal(before[name], after[name]) for name in before if name.endswith("proj.weight"))
    assert read(run / "eval.json")["domains"]["answers"]["after"]["acceptance_sampling"]["mean"] > 0


def test_trimmed_draft(begun: Path, world: Path, tmp_path: Path) -> None:
    run = run_with(begun, world, tmp_path, "eval", cut={"trim": 0.5}, target={"model": "./target"})
    kept = read(run / "draft" / "kept_tokens.json")
    assert kept == read(run / "cut" / "kept_tokens.json")
    assert len(kept["kept"]) in (256, 400 // 256 * 256, kept["vocabulary"]) and min(kept["mass"].values()) >= 0.5
    domains = read(run / "eval.json")["domains"]["answers"]
    assert set(domains) == {"before", "after", "after, full head"}
    assert domains["after"]["acceptance_ceiling"]["mean"] <= 1 + 1e-6  # a sum of probabilities in fp32
    assert domains["after, full head"]["acceptance_ceiling"]["mean"] == pytest.approx(1, abs=1e-5)


def test_what_a_head_holds_is_measured_on_answers_that_did_not_rank_it(
    begun: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And neither on dropped ones."""
    shutil.copytree(begun, tmp_path / "tiny")
    recipe = load_recipe(world / "recipe.yaml", ["cut.trim=0.5"])
    run, counted = Run(tmp_path / "tiny", recipe), list[list[Sample]]()

    vocabulary = TeacherStore(run).vocabulary

    def noted(some: Any, vocabulary: int) -> Any:
        counted.append([*some])
        return count_tokens(some, vocabulary)

    monkeypatch.setattr(cutter, "count_tokens", noted)
    answers = [one for one in read_answers(run, "train") if not one.dropped]
    spoilt = replace(answers[0], id="spoilt", answer=[7] * 99, dropped="empty")
    model = AutoModelForCausalLM.from_pretrained(world / "target")
    write_samples(run.path("answers", "train", "99999.arrow"), [spoilt])
    kept, metadata, _ = choose_head(recipe, run, model, vocabulary)
    ranking, measuring = ({one.id for one in some} for some in counted)
    assert ranking and measuring and not ranking & measuring and ranking | measuring == {one.id for one in answers}
    written = [token for one in counted[1] for token in one.answer]
    share = sum(token in kept for token in written) / len(written)
    assert share >= 0.5 and {one.source: share for one in answers} == metadata["mass"]
    # One block of answers is both.
    counted.clear()
    shutil.rmtree(run.path("answers", "train"))
    write_samples(run.path("answers", "train", "00000.arrow"), answers[:1])
    choose_head(recipe, run, model, vocabulary)
    assert [[one.id for one in some] for some in counted] == [[answers[0].id]]


def test_group_lasso_narrows_the_draft(begun: Path, world: Path, tmp_path: Path) -> None:
    train = {"steps": 50, "sparsity": {"mlp_width": 96}}
    run = run_with(begun, world, tmp_path, "train", cut={"mlp_width": None}, train=train)
    report = read(run / "draft" / "sparsity.json")["details"]
    assert report["width_before"] == 128 and min(report["removed_zero_share"]) >= 0.95
    model = AutoModelForCausalLM.from_pretrained(run / "draft")
    assert model.config.intermediate_size == 96 and model.model.layers[0].mlp.down_proj.in_features == 96


def test_cuts_are_made_from_train_texts_and_compared_on_validation_texts(
    begun: Path, world: Path, tmp_path: Path
) -> None:
    """Scored and refitted on the first blocks that the draft learns from; compared on the validation store, whose
    distributions are the target's own to within the entries that are kept. DataError if that store is empty."""
    shutil.copytree(begun, tmp_path / "tiny")
    run = Run(tmp_path / "tiny", load_recipe(world / "recipe.yaml"))
    count = run.recipe.cut.score_blocks
    assert torch.equal(score_blocks(run.recipe, run).ids, TeacherStore(run).packed.take(slice(0, count)).ids)
    compared = TargetDistributions.stored(run.recipe, run)
    held = TeacherStore(run, "validation")
    assert torch.equal(compared.blocks.ids, held.packed.take(slice(0, count)).ids) and held.exact
    model = AutoModelForCausalLM.from_pretrained(world / "target")
    assert compared.compare(model).kl == pytest.approx(0, abs=1e-4)
    manifest = run.path("teacher", "validation", "manifest.json")
    manifest.write_text(json.dumps(read(manifest) | {"shard_blocks": [], "answer_blocks": 0}))
    run.finish("teacher", "key", {}, [run.path("teacher")], 0)
    with pytest.raises(DataError, match="neither an answer nor text of the validation split"):
        TargetDistributions.stored(run.recipe, run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cut": {"layers": 9}}, "3"),
        ({"cut": {"donor": "./donor", "layers": None, "mlp_width": None}}, "cut.transplant"),
        ({"cut": {"mlp_width": 100}}, "multiple of 32"),
        ({"cut": {"trim": 300}}, "cut.trim is 300"),
        ({"cut": {"transplant": {"<|endoftex|>": "x"}}}, "<|endoftext|>"),
        ({"train": {"sparsity": {"mlp_width": 512}}}, "sparsity"),
    ],
)
def test_impossible_cuts_are_refused_before_any_work(
    changes: dict[str, Any], said: str, begun: Path, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tiny.contents(begun)
    run = run_with(begun, world, tmp_path, "cut", 2, **changes)
    message = capsys.readouterr().err
    assert said in message and "Traceback" not in message, message
    assert tiny.contents(run) == before


def test_a_donor_with_other_padding_gets_the_targets_rows(
    begun: Path, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run trains with it, and `check` says so and finds that vLLM takes the draft."""
    model = AutoModelForCausalLM.from_pretrained(world / "target")
    rows = model.config.vocab_size
    model.resize_token_embeddings(rows + 40)
    donor = world / "padded"
    model.save_pretrained(donor)
    AutoTokenizer.from_pretrained(world / "target").save_pretrained(donor)
    cut = tiny.recipe_values(world)["cut"] | {"donor": "./padded"}
    run = run_with(begun, world, tmp_path, "train", cut=cut)
    for folder in (run / "cut", run / "draft"):
        assert AutoModelForCausalLM.from_pretrained(folder).config.vocab_size == rows
    changes = read(run / "cut" / "surgery.json")["changes"]
    assert [change["operation"] for change in changes] == ["rows", "layers, MLP width", "repair"]
    assert changes[0]["details"] == {"rows": rows, "donor_rows": rows + 40, "tokens": rows}
    capsys.readouterr()
    said = tiny.shown(capsys, "check", world / f"{tmp_path.name}.yaml")
    assert f"gets the target's {rows} rows instead of the donor's {rows + 40}" in said
    assert "pair rule of vLLM: fits" in said


@pytest.mark.parametrize("trim", [None, 0.5])
def test_a_donor_with_a_head_of_its_own_beside_a_tied_target(
    begun: Path, world: Path, tmp_path: Path, trim: float | None
) -> None:
    """The draft keeps both matrices, in the folder and in its GGUF file."""
    target = AutoModelForCausalLM.from_pretrained(world / "target")
    assert target.config.tie_word_embeddings
    donor = toy("qwen2", target.config.vocab_size, 3, tie_word_embeddings=False, hidden_size=64, intermediate_size=128)
    save_toy(donor, AutoTokenizer.from_pretrained(world / "target"), world / "untied")
    cut = tiny.recipe_values(world)["cut"] | {"donor": "./untied", "mlp_width": 64, "trim": trim}
    run = run_with(begun, world, tmp_path, "export", cut=cut)
    for folder in (run / "cut", run / "draft"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert not model.config.tie_word_embeddings and "lm_head.weight" in load_file(folder / "model.safetensors")
        assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    assert read(run / "gguf" / "export.json")["files"][0]["faults"] == []


@tiny.needs_llama
def test_a_gemma_from_file_to_file(world: Path, tmp_path: Path) -> None:
    """Windows by pattern, four norms, scaled embeddings, a tied head: imported, cut, trimmed, trained, exported."""
    tokenizer = load_tokenizer(str(world / "target"))
    orders = [*(["sliding_attention"] * 2 + ["full_attention"]) * 2]
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "query_pre_attn_scalar": 16}
    model = toy("gemma3", 400, 6, layer_types=orders, tie_word_embeddings=True, initializer_range=0.1, **sizes)
    export_gguf(save_toy(model, tokenizer, tmp_path / "made"), tmp_path / "target.gguf", "f16")
    values = tiny.recipe_values(world, elsewhere=True) | {"target": {"model": "./target.gguf"}}
    values["answers"] |= {"prompts": 4}
    values["cut"] |= {"layers": 4, "mlp_width": 96, "trim": 0.5}
    values["train"] |= {"steps": 2, "acceptance": None}
    recipe = tiny.write_recipe(tmp_path / "recipe.yaml", values)
    assert tiny.call("train", recipe, "--runs", tmp_path, "--until", "export") == 0
    run = tmp_path / "tiny"
    config = load_config(str(run / "draft"))
    assert kinds_of(config) in families.orders("gemma3_text", 4) and config.intermediate_size == 96
    assert 256 <= len(read(run / "draft" / "kept_tokens.json")["kept"]) < 400
    (file,) = (one for one in read(run / "gguf" / "export.json")["files"] if "draft" in one["path"])
    assert not file["faults"] and file["parity"]["kl"] < 1e-3
    back = load_config(str(run / "gguf" / "draft-f16.gguf"))
    assert (back.layer_types, back.vocab_size) == (config.layer_types, config.vocab_size)
