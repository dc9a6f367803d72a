"""distill/planning/plan.py, planned.py, hardware.py and `distill plan`: predictions from costs, before there is a
draft."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy
import pytest
import tiny
import yaml
from test_cost import enumerated
from tiny import Capture, Patch
from toys import toy
from transformers import AutoModelForCausalLM, MambaConfig, T5Config

from distill.decoding.costs import CostCurve, DraftSteps, load_cost_curve, save_cost_curve
from distill.engines.torch.hugging_face import load_config
from distill.errors import DataError, RecipeError
from distill.files import write_result
from distill.measuring.evaluation_results import EvaluationReport, PositionAcceptance
from distill.planning.cases import PlanRequest, planned_config
from distill.planning.hardware import Hardware, StepWork, read_hardware, work_of, work_of_config
from distill.planning.hours import StageEstimate, estimated_hours
from distill.planning.plan import ALL, RATES, Case, SpeedupPlan, by_position, forecast, plan_blocks, step_costs
from distill.recipe import Recipe, load_recipe
from distill.tables import Interval, document

LENGTHS = (1, 2, 4, 8)


def straight(slope: float, draft: float, single: float = 3.0) -> Case:
    """T(m) = T(1)·(1 + slope·(m − 1)) and D = draft·T(1), so that all figures have a closed form."""
    target = [single * (1 + slope * m) for m in range(9)]
    return Case("a line", [step_costs(target, draft * single, draft * single, LENGTHS)], LENGTHS)


@pytest.mark.parametrize("rates", [[0.3], [0.9, 0.5, 0.2], [1.0], [0.0], [0.62, 0.55]])
def test_speedups_follow_from_the_tokens_of_a_round(rates: list[float]) -> None:
    case = straight(0.07, 0.12)
    for n in LENGTHS:
        tokens = enumerated(by_position(rates, n))
        assert case.speedup(case.timings[0], n, rates) == pytest.approx(tokens / (1 + 0.07 * n + 0.12 * n))


def test_break_even_has_its_closed_form() -> None:
    """1 + a = 1 + s + d for one drafted token; 1 + a + a² = 1 + 2(s + d) for two."""
    case = straight(0.2, 0.3)
    one, two, *_ = forecast(case, {}).lengths
    assert one.break_even == pytest.approx(0.5) and two.break_even == pytest.approx((math.sqrt(1 + 4 * 1.0) - 1) / 2)
    assert case.needed(case.timings[0], 1, 2 / 1.5) == pytest.approx(1.0)
    assert one.upper_bound == pytest.approx(2 / 1.5) and one.verify_cost == pytest.approx(1.2)
    assert math.isinf(case.needed(case.timings[0], 1, 1.5))


@pytest.mark.parametrize("rates", [[0.4], [0.9, 0.3], [1.0], [0.5]])
@pytest.mark.parametrize("prompt", [0, 40])
def test_the_largest_cost_of_a_draft_step_is_just_as_fast_as_plain_decoding(rates: list[float], prompt: int) -> None:
    """With a prompt that both models read, too, which is then paid for."""
    case = straight(0.0, 0.1)
    costs = replace(case.timings[0], target_prompt=0.3, draft_prompt=0.2)
    case = replace(case, timings=[costs], prompt=prompt, new=21)
    plain, rounds = prompt * 0.3 + 20 * 3.0, 20 / (1 + rates[0])
    assert case.speedup(costs, 1, rates) == pytest.approx(plain / (prompt * 0.5 + rounds * 3.3))
    largest = 3 * case.largest_cost(costs, rates)
    expensive = replace(costs, by_argmax=DraftSteps(largest, largest, largest))
    assert max(case.speedup(expensive, n, rates) for n in LENGTHS) == pytest.approx(1.0)


def test_verdicts() -> None:
    pays = forecast(straight(0.05, 0.1), {"mine": [0.9]})
    assert "pays from a conditional acceptance of 0.15 on (1 drafted)" in pays.sentences[0]
    assert f"at most {9 / 2.2:.2f}× (8 drafted)" in pays.sentences[0] and "it pays" in pays.sentences[1]
    slow = forecast(straight(0.1, 1.0), {"mine": [0.9]})
    assert "This draft cannot pay" in slow.sentences[0] and "less than 0.90 T(1) could" in slow.sentences[0]
    assert "it does not pay" in slow.sentences[1] and all(one.best == 0 for one in slow.scenarios)
    never = forecast(straight(1.0, 0.1), {})
    assert "No draft can pay here, because verifying" in never.sentences[0]
    assert all(one.break_even is None and one.upper_bound <= 1 for one in never.lengths)
    for plan in (pays, never):
        bound = next(one for one in plan.scenarios if one.title == ALL)
        assert [one.upper_bound for one in plan.lengths] == [speed.mean for speed in bound.speedups]
    assert max(one.largest_cost for one in never.scenarios) == pytest.approx(0, abs=1e-9)


def test_several_timings_give_a_range() -> None:
    slow, middle, fast = (straight(0.1, draft).timings[0] for draft in (0.3, 0.2, 0.1))
    found = forecast(Case("three", [slow, fast, middle], LENGTHS), {}).scenarios[0].speedups
    for place, n in enumerate(LENGTHS):
        low, mean, high = ((1 + enumerated([0.2] * n) - 1) / (1 + (0.1 + d) * n) for d in (0.3, 0.2, 0.1))
        assert (found[place].low, found[place].mean, found[place].high) == pytest.approx((low, mean, high))


def test_layers_that_a_cost_pays_for() -> None:
    """A draft of 5 layers costs .25, each further one .04."""
    case = replace(straight(0.0, 0.25), layers=(5, 0.04))
    for one in forecast(case, {}).scenarios:
        assert one.layers == max(0, math.floor(5 + (one.largest_cost - 0.25) / 0.04 + 1e-9))
    shown = document(plan_blocks(SpeedupPlan("x", {}, [forecast(case, {})])))
    assert "| layers |" in shown and "none: its head alone costs more" in shown


# ── machines that are described ──

MACHINE = {
    "name": "a box",
    "memory_gb_per_s": {"value": 100, "source": "made up for this test"},
    "compute_tflop_per_s": {"value": 2, "source": "made up for this test"},
    "overhead_ms": {"value": 1, "source": "made up for this test"},
}


def test_estimated_steps_are_bound_by_bytes_then_by_products() -> None:
    hardware = Hardware.model_validate(MACHINE)
    work = StepWork(2, 1e9, 4e9, 0.0, 1.0, 1e6, 8e9)
    read, computed = (4e9 + 1e9) / 100e9, 16 * 2 * 8e9 / 2e12
    assert work.seconds(1, 1000, hardware) == pytest.approx(read + 1e-3)
    assert work.seconds(16, 1000, hardware) == pytest.approx(computed + 1e-3)
    more = {key: {"value": value, "source": "made up"} for key, value in (("overlap", 0.5), ("layer_overhead_ms", 3))}
    half = Hardware.model_validate(MACHINE | more)  # of the shorter is hidden by the longer
    assert work.seconds(16, 1000, half) == pytest.approx(computed + read / 2 + 1e-3 + 2 * 3e-3)


def test_experts_are_read_as_more_tokens_ask_for_them() -> None:
    """8 experts of which a token uses 2: m tokens leave out each with chance (3/4)^m."""
    work = StepWork(1, 0.0, 100.0, 800.0, 0.25, 0.0, 300.0)
    assert work.weight_bytes(1) == pytest.approx(100 + 200)
    assert work.weight_bytes(3) == pytest.approx(100 + 800 * (1 - 0.75**3))


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
def test_work_of_a_configuration(kind: str) -> None:
    """A tied head is read once; an input embedding beside a head gives one row a token, which is left out."""
    model = toy(kind, layers=3)
    work = work_of_config(model.config, 2)
    tied = model.config.tie_word_embeddings
    total = sum(p.numel() for p in model.parameters()) - (0 if tied else model.model.embed_tokens.weight.numel())
    assert work.parameters == total and work.weight_bytes(1) == 2 * total == work.weight_bytes(9)
    assert work.layer_bytes == 2 * sum(p.numel() for p in model.model.layers[0].parameters())
    assert work.position_bytes == 3 * 2 * 2 * 8 * 2 and work.layers == 3


@pytest.mark.parametrize(("method", "experts", "others"), [(None, 2, 2), ("mxfp4", 17 / 32, 2), ("fp8", 1, 1)])
def test_work_of_a_mixture_of_experts(method: str | None, experts: float, others: float) -> None:
    """Weights of 2 bytes, or of those that they are published in: experts as MXFP4, all matrices of layers as FP8."""
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    if method is not None:
        config.quantization_config = {"quant_method": method}
    work = work_of_config(config, 2)
    assert work.expert_bytes == experts * 2 * 4 * 3 * 16 * 24 and work.used == 0.5
    norms, matrices = 5 * 16, 2 * (2 * 16 * 16 + 2 * 16 * 8 + 4 * 16)  # of layers: attention and router
    assert work.shared_bytes == 2 * (50 * 16 + norms) + others * matrices
    assert work.parameters == 50 * 16 + norms + matrices + work.expert_bytes / experts / 2
    assert work_of_config(config, 0.5).expert_bytes == 0.5 * 2 * 4 * 3 * 16 * 24  # asked to be smaller still


def test_only_layers_with_keys_cache_them() -> None:
    """Two of four layers are recurrent; of a model that reads images too, the language model counts alone."""
    from transformers import AutoConfig

    text = {
        "model_type": "qwen3_5_text", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    }  # fmt: skip
    work = work_of_config(AutoConfig.for_model("qwen3_5", text_config=text), 2)
    assert work.layers == 4 and work.position_bytes == 2 * (2 * 2 * 8 * 2)
    assert work == work_of_config(AutoConfig.for_model(**text), 2)


def test_a_latent_attention_caches_its_latents() -> None:
    """DeepSeek-V3 caches 512 + 64 numbers of a position in each layer (arXiv 2412.19437, 2.1.1), not 128 heads."""
    from transformers import DeepseekV3Config

    config = DeepseekV3Config(
        vocab_size=50, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
        topk_group=1, q_lora_rank=8, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=8, v_head_dim=8,
        first_k_dense_replace=1,
    )  # fmt: skip
    assert work_of_config(config, 2).position_bytes == 2 * (512 + 64) * 2


@pytest.mark.parametrize(("heads", "numbers"), [(1, 576), (4, 4 * (576 + 512))])
def test_latents_of_a_gguf_file(heads: int, numbers: int, tmp_path: Path) -> None:
    """With one cached head keys and values are the same numbers; files of before cache all heads."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "deepseek2")
    sizes = {"block_count": 2, "embedding_length": 16, "head_count": 4, "head_count_kv": heads}
    for name, size in (sizes | {"key_length": 576, "value_length": 512, "kv_lora_rank": 512}).items():
        getattr(writer, f"add_{name}")(size)
    writer.add_tensor("token_embd.weight", numpy.zeros((50, 16), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert work_of(str(tmp_path / "m.gguf"), 2).position_bytes == 2 * numbers * 2


@pytest.mark.parametrize("config", [MambaConfig(num_hidden_layers=2, hidden_size=32), T5Config(d_model=32)])
def test_a_model_without_the_sizes_of_a_decoder_is_refused_by_its_type(config: Any) -> None:
    with pytest.raises(DataError, match=f"not known, {config.model_type}: "):
        work_of_config(config, 2)


def test_work_of_a_gguf_file_is_that_of_its_folder(tmp_path: Path) -> None:
    from distill.gguf.writer import export_gguf

    tiny.build_model(tmp_path / "model")
    export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f16")
    ours, theirs = work_of(str(tmp_path / "model"), 2), work_of(str(tmp_path / "model.gguf"), 2)
    assert theirs.parameters == ours.parameters and theirs.position_bytes == ours.position_bytes
    assert ours.weight_bytes(1) <= theirs.weight_bytes(1) < 1.1 * ours.weight_bytes(1)  # vectors are f32 there


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.pop("overhead_ms"), "overhead_ms: is missing"),
        (lambda m: m.update(memory_gb_per_s=100), "a section is needed"),
        (lambda m: m["memory_gb_per_s"].pop("source"), "memory_gb_per_s.source: is missing"),
        (lambda m: m["memory_gb_per_s"].update(value=-1), "must be above 0"),
        (lambda m: m.update(link_gb_per_s={"value": 1, "source": "made up"}), "either memory_gb or link_share"),
        (lambda m: m.update(memory_gb={"value": 1, "source": "made up"}), "either memory_gb or link_share"),
    ],
)
def test_descriptions_that_cannot_be_used(tmp_path: Path, change: Callable[[Any], object], words: str) -> None:
    values = json.loads(json.dumps(MACHINE))
    change(values)
    (tmp_path / "box.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(RecipeError, match=words):
        read_hardware(tmp_path / "box.yaml")


# ── the command ──


def planned(capsys: Capture, *arguments: object) -> Any:
    return json.loads(tiny.shown(capsys, "plan", *arguments, "-o", "json"))


def saved(path: Path, seconds: Sequence[float], unit: str = "seconds") -> Path:
    save_cost_curve(CostCurve("big", "x", (64,), (tuple(seconds),), 5, unit), path)
    return path


def test_saved_curves(tmp_path: Path, capsys: Capture) -> None:
    target = saved(tmp_path / "t.json", [2.0, 2.2, 2.4, 2.6, 2.8])
    draft = saved(tmp_path / "d.json", [0.2, 0.3])
    assert load_cost_curve(target).seconds == ((2.0, 2.2, 2.4, 2.6, 2.8),)
    found = planned(capsys, "--target-curve", target, "--draft-curve", draft, "--acceptance", "0.8,0.5")
    (one,) = found["forecasts"]
    assert [length["length"] for length in one["lengths"]] == [1, 2, 3, 4]  # as far as the curve reaches
    mine = next(row for row in one["scenarios"] if row["title"] == "--acceptance")
    # After a round that was accepted whole, the draft's first step reads two tokens.
    assert mine["speedups"][1]["mean"] == pytest.approx(2.0 * (1 + 0.8 + 0.4) / (2.4 + 0.4 + 0.4 * 0.1))
    assert found["settings"][0].startswith("GGML_BATCH_COSTS=1,0.55,")
    shown = tiny.shown(capsys, "plan", "--target-curve", target, "--draft-cost", "0.1", "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(shown)))
    assert len(rows) == len(RATES) + 1 + 2 and len({row["table"] for row in rows}) == 2
    assert float(rows[0]["n = 1"]) > 0 and rows[0]["n = 1, low"] == ""


def test_a_log_of_llama_batched_bench(tmp_path: Path, capsys: Capture) -> None:
    lines = [json.dumps({"pp": 64, "tg": 32, "pl": m, "t_tg": 0.9 + 0.1 * m}) for m in (1, 2, 3)]
    (tmp_path / "log").write_text("\n".join(lines))
    log = ("--batched-bench", tmp_path / "log")
    said = tiny.shown(capsys, "plan", *log, "--acceptance", "0.9", "--draft-cost", "0.05")
    assert "--spec-draft-n-max 2" in said and f"at most {3 / 1.3:.2f}× (2 drafted)" in said


def test_the_acceptance_of_a_sister(tmp_path: Path, capsys: Capture) -> None:
    rates = [PositionAcceptance(n, 10, 5, Interval(rate, 0.0, 1.0)) for n, rate in ((1, 0.62), (2, 0.55))]
    write_result(tmp_path / "eval.json", EvaluationReport("x", {}, 2, {}, {"after": rates}, {}))
    target = saved(tmp_path / "t.json", [1.0, 1.1, 1.2])
    found = planned(capsys, "--target-curve", target, "--sister", tmp_path)
    (one,) = found["forecasts"]
    assert one["scenarios"][-1]["acceptance"] == [0.62, 0.55] and tmp_path.name in one["sentences"][-1]
    assert one["draft_cost"] == 0  # no draft was named


def test_a_pair_and_its_estimate(world: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "box.yaml").write_text(yaml.safe_dump(MACHINE))
    options = ("--lengths", "1,2", "--depth", 8, "--tokens", 8, "--hardware", tmp_path / "box.yaml", "--threads", 1)
    pair = (world / "target", "--draft", world / "target")
    here, there = planned(capsys, *pair, *options)["forecasts"]
    assert here["title"] == "this machine, measured" and there["title"] == "a box, estimated"
    assert here["prompt"] == 8 and all(row["speedups"][0]["low"] > 0 for row in here["scenarios"])
    assert there["draft_cost"] == pytest.approx(1, abs=0.01) and there["token_seconds"] > 1e-3
    assert "cannot pay" in there["sentences"][0] and here["draft_cost"] > 0
    (only,) = planned(capsys, *pair, *options[:-2], "--no-measure")["forecasts"]
    assert only == there
    (alone,) = planned(capsys, world / "target", "--lengths", "1,2", "--depth", 8, "--acceptance", "0.9")["forecasts"]
    assert alone["draft_cost"] == 0 and alone["prompt"] == 0
    assert all(row["layers"] is not None for row in alone["scenarios"])


def test_a_recipe(world: Path, capsys: Capture) -> None:
    """Its draft has the shape of the cut; by every backend that it asks for."""
    recipe = load_recipe(world / "recipe.yaml")
    config = planned_config(recipe)
    assert (config.num_hidden_layers, config.intermediate_size, config.hidden_size) == (2, 64, 64)
    assert len(config.layer_types) == 2
    found = planned(capsys, world / "recipe.yaml", "speedup.new_tokens=8", "--lengths", "1,2")["forecasts"]
    assert [one["title"] for one in found] == [f"this machine, measured, {name}" for name in recipe.speedup.backends]
    for one in found:
        assert (one["prompt"], one["new"]) == (16, 8) and one["draft_cost"] > 0
        assert one["scenarios"][0]["layers"] is not None


def test_a_verdict_is_told_before_the_next_engine_is_measured(world: Path, capsys: Capture, monkeypatch: Patch) -> None:
    told = []

    def measured(_: object) -> Iterator[Case]:
        for title in ("one", "two"):
            told.append(capsys.readouterr().err)
            yield replace(straight(0.1, 0.1), title=title)

    monkeypatch.setattr("distill.planning.cases.measured_cases", measured)
    assert tiny.call("plan", world / "recipe.yaml") == 0
    shown = capsys.readouterr()
    assert "one:\n" not in told[0] and "one:\n" in told[1] and "two:\n" not in shown.err  # the last one is in the table
    assert "**one**" in shown.out and "**two**" in shown.out


def test_hours_and_disk_of_the_run(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """By hand, from the parameters of the models as transformers builds them; of what others compute, nothing."""
    (tmp_path / "box.yaml").write_text(yaml.safe_dump(MACHINE))
    options = ("--no-measure", "--hardware", tmp_path / "box.yaml", "--lengths", "1")
    found = planned(capsys, world / "recipe.yaml", *options)
    stages = {one["stage"]: one for one in found["run"]}
    assert found["run_on"] == "a box" and [*stages] == ["answers", "teacher", "train"]
    recipe = load_recipe(world / "recipe.yaml")
    configs = (load_config(recipe.target.model), planned_config(recipe))
    models = [AutoModelForCausalLM.from_config(one) for one in configs]
    big, small = (sum(one.numel() for one in model.parameters()) for model in models)
    cached = 2 * 3 * 2 * 16 * 2  # bytes: keys and values of 3 layers, 2 heads of 16, in 16 bits

    def forward(parameters: int, tokens: int, depth: int) -> float:
        return max((4 * parameters + depth * cached) / 100e9, 2 * tokens * parameters / 2e12) + 1e-3

    # 12 texts, 2 at a time, 24 tokens each behind 8: 6 batches of 24 steps.
    assert stages["answers"]["low"] == pytest.approx(6 * 24 * forward(big, 2, 2 * (8 + 12)))
    positions, block = 1500 + 12 * (8 + 24), recipe.teacher.batch * 64
    assert stages["teacher"]["tokens"] == positions
    assert stages["teacher"]["low"] == pytest.approx(positions / block * forward(big, block, 0))
    assert stages["teacher"]["disk_bytes"] > positions * 8 * 6
    assert stages["train"]["low"] == pytest.approx(8 * 3 * forward(small, 4 * 64, 0))
    assert stages["train"]["disk_bytes"] == 3 * 12 * small
    changes = ("teacher.kind=online", "answers.writer={gguf: x.gguf}")
    other = {one.stage: one for one in hours(load_recipe(world / "recipe.yaml", changes), tmp_path)}
    assert other["answers"].low is other["teacher"].high is None and "gguf" not in other["teacher"].note
    shown = document(plan_blocks(SpeedupPlan("x", {}, [], run=[*other.values()], run_on="a box")))
    assert "| answers | 288 |  | – | written by the file or servers" in shown
    assert other["train"].low == pytest.approx(stages["train"]["low"] + 8 * forward(big, 4 * 64, 0))
    exact = hours(load_recipe(world / "recipe.yaml", ["teacher.kind=exact"]), tmp_path)[-1]
    rows, hidden = models[0].lm_head.weight.shape
    assert exact.low == pytest.approx(stages["train"]["low"] + 8 * 2 * 4 * 64 * rows * hidden / 2e12)


def hours(recipe: Recipe, folder: Path) -> list[StageEstimate]:
    works = PlanRequest.of(recipe).works()
    return estimated_hours(recipe, read_hardware(folder / "box.yaml"), works, planned_config(recipe))


def test_a_training_that_must_pay(world: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """A round costs more than a plain step: where nothing is accepted it cannot pay. Seconds are readings."""
    clock = SimpleNamespace(perf_counter=count().__next__)
    for module in ("costs", "decode", "drafters", "round_costs"):
        monkeypatch.setattr(f"distill.decoding.{module}.time", clock)
    asked = (world / "recipe.yaml", "--runs", tmp_path / "runs", "speedup.backends=[pytorch]", "--must-pay", 0)
    assert tiny.call("train", *asked) == 2
    said = capsys.readouterr().err
    assert "plan, this machine, measured, pytorch:" in said and "is predicted to be no faster" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "expected a target, a recipe"),
        (("x", "--target-curve", "y"), "expected a target, a recipe"),
        (("x.gguf",), "there is no file x.gguf"),
        (("x", "a.b=c"), "overrides a recipe's key"),
        (("missing.yaml",), "no recipe at missing.yaml"),
        (("missing.yaml", "--draft", "x"), "of a recipe, override its key: cut.layers"),
        (("x", "--draft", "y", "--draft-cost", "1"), "were given together"),
        (("x", "--no-measure"), "leaves nothing but an estimate"),
        (("--target-curve", "missing.json"), "there is no curve missing.json"),
        (("--target-curve", "missing.json", "--hardware", "x"), "a curve has none"),
        (("--target-curve", "missing.json", "--draft", "x"), "give --draft-curve"),
        (("--target-curve", "x", "--no-measure"), "leaves nothing but an estimate"),
        (("--target-curve", "x", "--key", "KEY"), "--key is for --server"),
        (("--target-curve", "x", "--server", "http://127.0.0.1:1"), "expected a target, a recipe"),
        (("--server", "http://127.0.0.1:1"), "cannot be reached"),
        (("--target-curve", "x", "--lengths", "0"), "from 1 to 63"),
        (("--target-curve", "x", "--acceptance", "1.2"), "from 0 to 1"),
        (("--target-curve", "x", "--sister", "missing"), "holds no eval.json"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str, capsys: Capture) -> None:
    said = tiny.refused(capsys, "plan", *arguments)
    assert words in said


def test_files_that_are_no_curves(tmp_path: Path) -> None:
    texts = {"[]": "JSON object", '{"format": 9}': "not a cost curve", '{"format": 1}': "`model` is missing"}
    for text, words in texts.items():
        (tmp_path / "c.json").write_text(text)
        with pytest.raises(DataError, match=words):
            load_cost_curve(tmp_path / "c.json")


def test_curves_that_do_not_go_together(tmp_path: Path, capsys: Capture) -> None:
    target, draft = saved(tmp_path / "t.json", [1.0, 1.1], "T(1)"), saved(tmp_path / "d.json", [0.1, 0.2])
    assert "the draft's in seconds" in tiny.refused(capsys, "plan", "--target-curve", target, "--draft-curve", draft)
    short = saved(tmp_path / "s.json", [1.0])
    assert "ends at m = 1" in tiny.refused(capsys, "plan", "--target-curve", short)
