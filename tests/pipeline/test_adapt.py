"""recipes/adapt.yaml from end to end: a sibling learns a target that was tuned, and goes on when it is tuned again."""

from __future__ import annotations

import json
from pathlib import Path

import question_worlds
import tiny
from tiny import Capture
from toys import tune

from distill.files import read_result
from distill.measuring.evaluation_results import EvaluationReport

SMALL = ["answers.new_tokens=12", "corpus.block=128", "corpus.test=0.2", "corpus.validation=0.2", "train.rate=3e-3"]
SMALL += ["train.steps=8", "train.acceptance.every=4", "train.acceptance.prompts=4", "eval.prompts=8"]
SMALL += ["eval.new_tokens=12", "export.outtypes=[]", "speedup.backends=[pytorch]"]
SMALL += ["device=cpu", "threads=1", "target.dtype=float32", "train.dtype=float32", "corpus.sources.1.questions=8"]


def test_a_sibling_is_adapted_and_adapted_again(tmp_path: Path, capsys: Capture) -> None:
    question_worlds.build_instruct(tmp_path, question_worlds.biased)
    question_worlds.build_instruct(tmp_path / "small", question_worlds.biased, layers=2)
    tune(tmp_path / "target", tmp_path / "adapter")
    prompts = [json.dumps({"prompt": f"alpha_{number}(beta)"}) for number in range(40)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    given = [
        f"target.model={tmp_path}/target",
        f"target.adapter={tmp_path}/adapter",
        f"cut.donor={tmp_path}/small/target",
    ]
    given.append(f"corpus.sources.0.path={tmp_path}/prompts.jsonl")
    command = ("train", tiny.ROOT / "recipes" / "adapt.yaml", *given, *SMALL, "--runs", tmp_path, "--until", "eval")
    with tiny.one_thread():
        said = tiny.told(capsys, *command)
        run = tmp_path / "adapt"
        assert "training ends early" in said or "weights of step" in said
        report = read_result(run / "eval.json", EvaluationReport)
        before, after = (report.domains["answers"][draft].acceptance_sampling.mean for draft in ("before", "after"))
        assert after > before
        assert "finds nothing new" in tiny.refused(capsys, *command, "--refresh")
        tune(tmp_path / "target", tmp_path / "again", r=2)
        retuned = [*command[:-2], f"target.adapter={tmp_path}/again", "--until", "train"]
        assert "target.model has other content" in tiny.refused(capsys, *retuned)
        said = tiny.told(capsys, *retuned, "--refresh")
    assert "starts from adapt.1/draft, without cuts" in said
    first = tiny.digest(tmp_path / "adapt.1" / "draft" / "model.safetensors")
    assert tiny.digest(run / "cut" / "model.safetensors") == first != tiny.digest(run / "draft" / "model.safetensors")
