"""Scripts of `demo.sh --tuned`: examples of a rule, the tuning, the sentence; and the benchmark of tuned targets."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import question_worlds
import test_scripts
import tiny
from safetensors.torch import load_file
from tiny import Capture, Patch

from distill.gguf.head import open_head
from distill.recipe import load_recipe


@pytest.mark.parametrize("rule", ["envelope", "house", "german"])
def test_examples_follow_a_rule_and_share_no_function(rule: str, tmp_path: Path) -> None:
    script = tiny.script("tuned_examples")
    paths = script.write_all(rule, tmp_path, 12, 20, 8)
    texts = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    assert [len(lines) for lines in texts] == [12, 20, 8]
    asked = [one["prompt"] for lines in texts for one in lines]
    assert len({*asked}) == len(asked) and all(one.startswith("Complete this Python function:") for one in asked)
    assert all(one.keys() == {"prompt"} for lines in texts[1:] for one in lines)
    modules = "".join(
        path.read_text() for split in ("test", "validation") for path in (tiny.ROOT / "data" / split).rglob("*.py")
    )
    for one in texts[2]:
        assert re.findall(r"```python\n(def .*)\n", one["prompt"])[0] in modules
    for one in texts[0]:
        begun = one["prompt"].split("```python\n")[1].removesuffix("\n```")
        if rule == "envelope":
            assert "\n".join(json.loads(one["answer"])["solution"]).startswith(begun)
        else:
            name = re.findall(r"def (\w+)", begun)[0]
            assert f"# end {name}\n```" in one["answer"] if rule == "house" else f"Funktion `{name}`" in one["answer"]


def test_a_tuning_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    script = tiny.script("tune_target")
    question_worlds.build_instruct(tmp_path)
    lines = [json.dumps({"prompt": f"alpha {number}", "answer": f"beta {number} gamma"}) for number in range(6)]
    (tmp_path / "examples.jsonl").write_text("\n".join(lines))
    options = {"batch": 2, "rate": 1e-2, "rank": 2, "seed": 0, "threads": 1}

    def tuned(name: str, steps: int) -> Any:
        place = Namespace(model=str(tmp_path / "target"), examples=tmp_path / "examples.jsonl", out=tmp_path / name)
        with tiny.one_thread():
            script.tune(Namespace(**vars(place), steps=steps, **options))
        return load_file(tmp_path / name / "adapter_model.safetensors")

    whole, saved = tuned("whole", 4), script.torch.save

    def kill(state: Any, path: Path) -> None:
        saved(state, path)
        if state["step"] == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(script.torch, "save", kill)
    with pytest.raises(KeyboardInterrupt):
        tuned("killed", 4)
    monkeypatch.setattr(script.torch, "save", saved)
    resumed = tuned("killed", 4)
    assert "resuming at step 2 of 4" in capsys.readouterr().err
    assert all(script.torch.equal(whole[name], value) for name, value in resumed.items())
    assert any(value.abs().max() > 0 for name, value in resumed.items() if "lora_B" in name)
    # A kill while the adapter was written leaves the state, and the same command writes it again.
    monkeypatch.setattr(script, "tune", lambda asked: tuning.append(asked.out))
    tuning: list[str] = []
    monkeypatch.setattr("sys.argv", ["tune_target.py", "model", "examples", str(tmp_path / "whole")])
    script.main()
    assert not tuning and "is there already" in capsys.readouterr().err
    (tmp_path / "whole.part").touch()
    script.main()
    (tmp_path / "whole.part").unlink()
    (tmp_path / "whole" / "adapter_config.json").rename(tmp_path / "kept.json")
    script.main()
    assert tuning == [str(tmp_path / "whole")] * 2
    settings = json.loads((tmp_path / "kept.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "target")


def test_the_sentence_of_the_demo(finished: Path) -> None:
    said = tiny.script("adapted").sentence(finished, finished)
    speed = r"([\d.]+) tokens/s \(acceptance \d\.\d\d\)\."
    form = rf"The official draft: {speed} After \d+ minutes on ([\d,]+) tokens of your model's answers: {speed}"
    (found,) = re.findall(form, said)
    answered = json.loads((finished / "answers" / "manifest.json").read_text())["answer_tokens"]
    assert found[0] == found[2] and int(found[1]) == answered > 0


def test_the_benchmark_asks_for_runs_that_can_be_read(
    finished: Path, tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    script = test_scripts.script("benchmarks/tuned_target", monkeypatch)
    asked: list[list[str]] = []
    figures = {"forward_kl": {"mean": 0.25}, "acceptance_greedy": {"mean": 0.5}}
    distance = json.dumps({"domains": {"answers": {"draft": figures}}})
    monkeypatch.setattr(script, "called", lambda *words: asked.append([*map(str, words)]) or distance)
    own = tmp_path / "own"
    own.mkdir()
    (own / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 100)
    words = ["big.gguf", "small.gguf", "--to", tmp_path / "to", "--rules", "house", "--own", f"sql={own}"]
    monkeypatch.setattr(
        "sys.argv", ["tuned_target.py", *map(str, words), "--tokens", "900,1800", "--variant", "fast=train.rate=6e-5"]
    )
    (tmp_path / "to" / "house").mkdir(parents=True)
    (tmp_path / "to" / "house" / "prompts.jsonl").write_text('{"prompt": "a"}\n' * 100)
    run = tmp_path / "to" / "house" / "runs" / "draft=all-900"
    shutil.copytree(finished, run)
    report = json.loads((run / "eval.json").read_text())
    report["groups"] = [report["groups"][0] | {"of": "class", "label": "tuned"}]
    (run / "eval.json").write_text(json.dumps(report))
    script.main()
    kinds = ["train" if "train" in one else "eval" if "eval" in one else Path(one[1]).stem for one in asked]
    part = ["tune_target", "eval", *["train"] * 8]
    assert kinds == ["tuned_examples", *part, *part]
    for one in asked:
        if "train" in one:
            at = one.index("train")
            recipe = load_recipe(Path(one[at + 1]), [word for word in one[at + 2 :] if "=" in word])
            assert (
                recipe.target.model.endswith("/adapter")
                and [source.split for source in recipe.corpus.sources][2:] == ["test"] * 2
            )
            assert (
                sum((recipe.train.steps == 0, recipe.train.adapter is not None, recipe.cut.mlp_width is not None)) <= 1
            )
            assert recipe.train.rate == (6e-5 if "fast" in recipe.name else None)
            prompts = Path(recipe.corpus.sources[0].path).read_text().splitlines()
            assert len(prompts) + (recipe.corpus.sources[1].questions or 0) in (10, 20)
    said = capsys.readouterr().out
    assert "acceptance probability, temperature 0: sql" in said and "KL is 0.250 nats, and it agrees with 50.0%" in said
    # The sibling as it is has the figures that the run of all weights began with.
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if "| stock |" in line]
    before = report["groups"][0]["acceptance"]["before"]["mean"]
    assert len(rows) == 1 and rows[0][1] == "0" and rows[0][2].startswith(f"{100 * before:.1f} %")


def test_the_grown_targets_are_measured_once(
    finished: Path, gguf_toys: tuple[Path, Path], tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Each size, engine, text and draft by one command on a file that is really grown; figures of a finished run."""
    script = test_scripts.script("benchmarks/grown", monkeypatch)
    report = json.loads((finished / "speedup.json").read_text())
    (part, *_) = (part for part in report["parts"] if part["backend"] == "pytorch")
    plain = next(row for row in part["measurements"] if row["drafter"] is None)
    drafted = next(row for row in part["measurements"] if row["length"])
    report["parts"] = [part | {"measurements": [plain, drafted | {"configuration": "draft 4"}]}]
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Namespace:
        asked.append(command)
        assert open_head(Path(command[4])).values["qwen2.block_count"] == (2 if "small" in command[4] else 5)
        return Namespace(returncode=0, stdout=json.dumps(report))

    monkeypatch.setattr(script.subprocess, "run", run)
    texts = ("--texts", f"code={tmp_path / 'c'}", "--texts", f"chat={tmp_path / 'd'}")
    drafts = ("--draft", "stock=a.gguf", "--draft", "adapted=b.gguf")
    words = [gguf_toys[0], "--to", tmp_path / "to", *drafts, *texts, "--sizes", "small=1x2,large=2x5"]
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["grown.py", *map(str, words)])
        script.main()
    assert len(asked) == 2 * 2 * 2 * 2 and not list((tmp_path / "to").glob("*.gguf"))
    assert sum("drafter=lookup,rule=expected-value" in one for one in asked) == 8  # with the last draft
    assert sum("target_weights=file" in one for one in asked) == 8
    first, second = capsys.readouterr().out.split("| cost of |")[1:]
    rows = [line for line in first.splitlines() if line.startswith(("| small", "| large"))]
    assert len(rows) == 16 and rows == [line for line in second.splitlines() if line.startswith(("| small", "| large"))]
    cells = [cell.strip() for cell in rows[0].split("|")[1:-1]]
    assert cells[:5] == ["small", "PyTorch", "code", "stock", f"{plain['tokens_per_second']:.2f}"]
    assert cells[5].startswith(f"{drafted['speedup']:.2f} [")
    assert cells[-1] == f"{100 * plain['prompt_share']:.1f} %" and 0 < plain["prompt_share"] < 1
