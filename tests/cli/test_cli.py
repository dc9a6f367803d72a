"""Every command, on a tiny run and on standalone pairs."""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from tiny import Capture, Patch

from distill.cli.app import ESCAPED
from distill.files import read_result
from distill.measuring.evaluation_results import EvaluationReport
from distill.measuring.speedup_results import SpeedupReport
from distill.pipeline.figures import stage_figure
from distill.progress import ERASE
from distill.recipe import load_recipe
from distill.run import Run
from distill.training.saved import TrainingSummary

pytestmark = pytest.mark.usefixtures("one_thread")


def test_check(world: Path, capsys: Capture) -> None:
    said = tiny.shown(capsys, "check", world / "recipe.yaml")
    for words in ("3 layers -> 2, MLP 128 -> 64", "pair rule of llama.cpp: fits", "teacher store", "check passed"):
        assert words in said
    said = tiny.shown(capsys, "check", "--offline", tiny.ROOT / "recipes" / "qwen-coder.yaml")
    assert "not checked: model" in said and "apart from the items listed as not checked" in said


def test_until_and_dry_run(world: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ("train", world / "recipe.yaml", "--runs", tmp_path / "runs")
    assert "corpus: would run (new)" in tiny.told(capsys, *command, "--dry-run")
    assert not (tmp_path / "runs").exists()
    assert tiny.call(*command, "--until", "corpus") == 0
    assert (tmp_path / "runs" / "tiny" / "stages" / "corpus.json").exists()
    assert not (tmp_path / "runs" / "tiny" / "answers").exists()
    before = tiny.contents(tmp_path)
    said = tiny.told(capsys, *command, "--dry-run")
    assert "corpus: up to date" in said and "answers: would run (new)" in said
    assert tiny.contents(tmp_path) == before
    assert "1 of 9 stages, next answers" in tiny.shown(capsys, "runs", "--runs", tmp_path / "runs")


def test_signs_that_a_terminal_lacks_are_escaped(copied: Path) -> None:
    """Of cp1252 and ASCII, in tables and JSON; an argument is read as UTF-8 all the same. Links lead nowhere."""
    (copied / "nowhere").symlink_to("/nowhere")
    (copied / "loop").symlink_to("loop")
    text = "1.5× → 🚀\ud800"
    assert text.encode("cp1252", ESCAPED).decode("cp1252") == "1.5× \\u2192 \\ud83d\\ude80\\ud800"
    called = [sys.executable, "-m", "distill"]
    posix = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "HOME": "/tmp"}
    listed = subprocess.run([*called, "runs", "--runs", copied.parent], cwd=tiny.ROOT, capture_output=True, env=posix)
    assert (listed.returncode, listed.stderr) == (0, b"") and b"finished" in listed.stdout
    asked = subprocess.run(
        [*called, "generate", "größe →".encode(), "tiny", "--tokens", "2", "--no-chat", "--runs", copied.parent],
        cwd=tiny.ROOT,
        capture_output=True,
        env=posix,
    )
    assert asked.returncode == 0 and asked.stdout.isascii(), asked.stderr
    named = [*called, "check", "größe.yaml".encode()]
    lost = subprocess.run(named, cwd=tiny.ROOT, capture_output=True, env=posix)
    assert lost.returncode == 2 and b"in this locale" in lost.stderr and b"LC_ALL=C.UTF-8" in lost.stderr
    # A terminal of 60 columns, without colours.
    narrow = os.environ | {"COLUMNS": "60", "NO_COLOR": "1", "TERM": "dumb", "PYTHONIOENCODING": "cp1252"}
    for words in (("chat", "--help"), ("train", "nowhere.yaml")):
        done = subprocess.run([*called, *words], cwd=tiny.ROOT, capture_output=True, env=narrow)
        text = (done.stdout + done.stderr).decode("cp1252")
        assert done.returncode == 2 * (words[0] == "train") and "Traceback" not in text and "\x1b" not in text
        assert words[0] != "chat" or max(map(len, text.splitlines())) <= 60


@pytest.mark.parametrize("command", ["eval", "speedup", "runs"])
@pytest.mark.parametrize("output", ["md", "json", "jsonl", "csv"])
def test_outputs(finished: Path, capsys: Capture, command: str, output: str) -> None:
    names = [] if command == "runs" else ["tiny"]
    said = tiny.shown(capsys, command, *names, "--runs", finished.parent, "-o", output)
    strict = functools.partial(json.loads, parse_constant=pytest.fail)  # NaN and Infinity are not JSON
    key = "state" if command == "runs" else "table"
    if output == "md":
        assert "|---|" in said
    elif output == "json":
        tiny.require_form(capsys, command, strict(said))
    else:
        rows = csv.DictReader(io.StringIO(said)) if output == "csv" else map(strict, said.splitlines())
        assert all(row[key] for row in rows) and said.count("\n") > (output == "csv")


def test_tables_of_a_run(finished: Path, capsys: Capture) -> None:
    tables = ("acceptance probability, greedy", "conditional acceptance by draft position")
    for option, there in (("--kl", [True, False]), ("--acceptance", [False, True])):
        said = tiny.shown(capsys, "eval", finished, option)
        assert [table in said for table in tables] == there
    said = tiny.shown(capsys, "speedup", finished).replace("**", "")  # whichever row is the fastest
    for row in ("target | pytorch | plain", "target | gguf | draft 3", "A round gives"):
        assert row in said


def test_runs_side_by_side(copied: Path, capsys: Capture) -> None:
    """Finished, cut and begun runs, as their files hold them; what makes them incomparable is said."""
    other, cut, begun = (copied.with_name(name) for name in ("a<b> & שלום", "cut", "begun"))
    for folder, stages in ((other, ()), (cut, ("train", "eval", "speedup", "export")), (begun, ("cut",))):
        shutil.copytree(copied, folder)
        for stage in stages:
            (folder / "stages" / f"{stage}.json").unlink()
    evaluation = json.loads((other / "eval.json").read_text())
    evaluation["domains"]["answers"]["after"]["acceptance_sampling"] |= {"mean": 0.625, "low": 0.5, "high": 0.75}
    (other / "eval.json").write_text(json.dumps(evaluation))
    runs = ("report", copied, other, cut, begun)
    rows = json.loads(tiny.shown(capsys, *runs, "-o", "json"))
    drafts = {(row["run"], row["engine"]): row for row in rows if row["#"] is not None}
    speedups = {f"{part['backend']}": part for part in json.loads((copied / "speedup.json").read_text())["parts"]}
    row, steps = drafts["tiny", "PyTorch"], speedups["pytorch"]["steps"]
    assert row["D"] == steps["draft"]["1"] / steps["target"]["1"]
    way = next(one for one in speedups["pytorch"]["measurements"] if one["configuration"] == row["fastest way"])
    assert [row[name] for name in ("measured", "measured, low", "tokens/s")] == [
        way[name] for name in ("speedup", "speedup_low", "tokens_per_second")
    ]
    rate, target = row["greedy"], {int(m): seconds for m, seconds in steps["target"].items()}
    rounds = [
        (sum(rate**i for i in range(m)), seconds / target[1] + (m - 1) * row["D"]) for m, seconds in target.items()
    ]
    assert row["predicted"] == pytest.approx(max(tokens / seconds for tokens, seconds in rounds))
    assert drafts[other.name, "llama.cpp"]["acceptance, low"] == 0.5 and len(drafts) == 6
    assert drafts["cut", None]["layers, M"] > 0 and drafts["begun", None]["fastest way"] == "not measured yet"
    assert [row["fastest way"] for row in rows if row["#"] is None] == ["plain", "plain"]
    page = (copied.parent / "compared.html").read_text()
    assert page.count("<svg") == 2 and "a&lt;b&gt; &amp; שלום" in page and "<script" not in page and "a<b>" not in page
    said = tiny.shown(capsys, *runs)
    assert "do not compare" not in said and "| 62.5 % [50.0, 75.0] |" in said
    tiny.edit(other / "stages" / "corpus.json", inputs={"target.model": "another"})
    said = tiny.shown(capsys, *runs, *[copied] * 36)
    assert "These runs have different targets: figures that depend on them do not compare.\n" in said
    assert "| tiny | 40 |" in said and "<svg" not in (copied.parent / "compared.html").read_text()


def test_other_commands_do_not_train_a_run(ready: Path, tmp_path: Path, capsys: Capture) -> None:
    run = shutil.copytree(ready, tmp_path / "tiny")
    commands = [(name, run) for name in ("report", "eval", "speedup", "export-gguf")]
    for command in (*commands, ("generate", "x", run), ("speedup", run, "--prompts", __file__)):
        said = tiny.refused(capsys, *command)
        assert f"{run} has no trained draft yet\n" in said and f"distill train {run}/config.yaml --runs " in said
    (run / "checkpoints" / "step-000004").mkdir(parents=True)
    assert "no trained draft yet (the last checkpoint is at step 4 of 8)" in tiny.refused(capsys, "eval", run)
    assert not (run / "draft").exists()


def test_a_report_is_copied_and_shown(copied: Path, capsys: Capture, monkeypatch: Patch) -> None:
    shown, to = list[str](), copied.parent / "to"
    monkeypatch.setattr("typer.launch", shown.append)
    assert tiny.shown(capsys, "report", copied, "--open", "--to", to).strip() == str(to)
    assert {one.name for one in to.iterdir()} == {"report.html", "README.md", "eval.md", "speedup.md"}
    assert shown == [str(copied / "report.html")]
    assert "is not empty" in tiny.refused(capsys, "report", copied, "--to", to)
    import distill.api  # noqa: F401

    page: Any = read_result(copied / "speedup.json", SpeedupReport)
    assert "<svg" in page._repr_html_() and "<table>" in page._repr_html_()
    page = read_result(copied / "eval.json", EvaluationReport)
    assert "<svg" in page._repr_html_() and "<table>" in page._repr_html_()


def test_a_report_needs_the_draft_itself(copied: Path, capsys: Capture) -> None:
    shutil.rmtree(copied / "draft")
    assert f"{copied / 'draft'} is missing" in tiny.refused(capsys, "report", copied)


# ── standalone pairs and folders ──


@pytest.mark.usefixtures("short_texts")
def test_eval_of_gguf_files_is_that_of_their_folders(
    world: Path, finished: Path, tmp_path: Path, capsys: Capture
) -> None:
    folders = {"target": world / "target", "draft": finished / "draft"}
    for folder in folders.values():
        assert tiny.call("export-gguf", folder, "--outtype", "f32", "--to", tmp_path) == 0
    files = {name: tmp_path / f"{folder.name}-f32.gguf" for name, folder in folders.items()}
    text = [part for file in ("part2_0.py", "part2_1.py") for part in ("--prompts", world / "corpus" / "test" / file)]
    more = ("--count", "4", "--temperature", "0", "--threads", "1", "-o", "json")

    def evaluated(target: Path, draft: Path) -> Any:
        return json.loads(tiny.shown(capsys, "eval", target, draft, *text, *more))

    found = [evaluated(pair["target"], pair["draft"]) for pair in (folders, files)]
    assert [set(one["domains"]) for one in found] == [{"answers", "files"}] * 2
    for domain in ("answers", "files"):
        torch, gguf = (one["domains"][domain]["draft"] for one in found)
        assert torch["tokens"] == gguf["tokens"] > 50
        assert torch["acceptance_drawn"]["mean"] is gguf["acceptance_drawn"]["mean"] is None  # greedy: nothing is drawn
        for name in set(torch) - {"tokens", "prompts", "acceptance_drawn"}:
            assert gguf[name]["mean"] == pytest.approx(torch[name]["mean"], rel=2e-3, abs=2e-3), (domain, name)
    for name in ("positions", "tokens_per_round"):
        assert found[0][name] == found[1][name]
    mixed = evaluated(folders["target"], files["draft"])  # the file is imported
    assert mixed["domains"] == found[0]["domains"] and mixed["positions"] == found[0]["positions"]


PAIR = ["TARGET", "DRAFT"]
EMPTY = ["--runs", "EMPTY"]
HOT = ["--temperature", "0.9"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "RECIPE", *EMPTY, "--until", "trian"], "there is no stage `trian`"),
        (["runs", *EMPTY], "there are no runs in "),
        (["eval", *EMPTY], "there are no runs in "),
        (["eval", "nothing", *EMPTY], "there is no run at "),
        (["generate", "", "RUN"], "the prompt is empty"),
        (["generate", "x", "--tokens", "many"], "unable to parse string as an integer (got 'many')"),
        (["eval", *PAIR], "--prompts FILE"),
        (["eval", *PAIR, "--prompts", "RECIPE", "--llama", "ngl=1"], "PyTorch runs"),
        (["eval", "RUN", "--llama", "ngl=1"], "--llama: without effect with a run, which is evaluated in PyTorch"),
        (["eval", "./nowhere", "DRAFT", "--prompts", "RECIPE"], "nowhere"),
        (["eval", *PAIR, "--prompts", "./nothing.py"], "there is no file"),
        (["generate", "x", "TARGET", "DRAFT", "TARGET"], "3 models are named"),
        (["generate", "x", "RUN", "--sampler", "top_k=4"], "draws nothing"),
        (["generate", "x", "RUN", "-C", "drafter=tree,length=0"], "length: input should be greater than or equal to 1"),
        (["eval", "-o", "xml"], "'--output' / '-o': 'xml' is not one of 'md', 'json', 'jsonl', 'csv', 'schema'."),
        (["train", "--nonsense"], "--nonsense"),
        (["train", "RECIPE", "--lengths", "2"], "changed by speedup.lengths=VALUE"),
        (["train", "RECIPE", "--seed", "2"], "by seed=VALUE"),
        (["trian"], "trian"),
        (["generate", "a", "RUN", "-C", "verifier=greedy", *HOT], "would change the target's distribution"),
        (["generate", "a", "RUN", "-C", "verifier=nonsense"], "there is no verifier 'nonsense'"),
        (["generate", "a", "RUN", "-C", "drafter=tree", "--repetition-penalty", "1.2"], "repetition penalty"),
        (["export-gguf", "TARGET", "--outtype", "q2", *EMPTY], "--outtype q2 is unknown"),
        (["profile", "DRAFT", "--pytorch", "compile=true"], "set static, too"),
        (["profile", "DRAFT", "--dtype", "int8"], "'int8' is not one of 'auto', 'float32'"),
        (
            ["profile", "nothing.gguf", "--pytorch", "static=true"],
            "--pytorch: without effect on nothing.gguf, which runs in llama.cpp",
        ),
        (["profile", "DRAFT", "--depths", "x"], "expected numbers separated by commas"),
        (["profile", "DRAFT", "--depths", "9999"], "no room"),
        (["profile", "nothing.gguf"], "there is no file"),
        (["profile", "nothing.gguf", "--types", "q8_9"], "--types q8_9 is unknown"),
        (["profile", "TARGET", "--depths", "0,8"], "at least 1"),
    ],
)
def test_a_wrong_command_is_one_message(
    world: Path, finished: Path, tmp_path: Path, capsys: Capture, arguments: list[str], expected: str
) -> None:
    places = {"TARGET": world / "target", "RUN": finished, "RECIPE": world / "recipe.yaml"}
    places |= {"DRAFT": finished / "draft", "EMPTY": tmp_path}
    said = tiny.refused(capsys, *(places.get(name, name) for name in arguments))
    assert expected in " ".join(said.split())
    assert not list(tmp_path.iterdir())


def test_a_fresh_run_is_planned_as_one(world: Path, finished: Path, capsys: Capture) -> None:
    """Also where the run that it replaces was made with other settings."""
    again = ("train", world / "recipe.yaml", "--runs", finished.parent, "--fresh", "--dry-run", "corpus.block=48")
    said = tiny.told(capsys, *again)
    assert "corpus: would run (new)" in said and "up to date" not in said


def test_threads(world: Path, copied: Path, capsys: Capture, monkeypatch: Patch) -> None:
    """The option comes before the recipe, the recipe before the variable, the variable before all cores."""
    asked: list[int] = []
    monkeypatch.setattr("torch.set_num_threads", asked.append)
    monkeypatch.setattr("distill.machine.usable_cores", lambda: 7)
    prompt, run = ("def alpha(", "--tokens", 2), ("tiny", "--runs", copied.parent)
    pair = (world / "target", copied / "draft")
    for variable, arguments, wanted in (
        ("", pair, 7),
        ("4,2", pair, 4),
        ("3", (*pair, "--threads", 2), 2),
        ("3", run, 1),
        ("3", (*run, "--threads", 2), 2),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert tiny.call("generate", *prompt, *arguments) == 0
        assert asked.pop() == wanted
    kept = (copied / "config.yaml").stat()
    for command, wanted in (("eval", "--threads", 2), 2), (("speedup",), 1):
        assert tiny.call(*command, "tiny", "--runs", copied.parent) == 0
        assert asked.pop() == wanted
    assert (copied / "config.yaml").stat() == kept  # measuring changes no run
    for variable in ("many", "0", "99999999999"):
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
        assert "OMP_NUM_THREADS" in tiny.refused(capsys, "generate", *prompt, *pair)
    assert "--threads" in tiny.refused(capsys, "generate", *prompt, *pair, "--threads", 10**6)


def test_generate(world: Path, finished: Path, capsys: Capture) -> None:
    """Greedy texts are equal whoever drafts, of a run and of its pair; a run drafts as was the fastest."""
    run = ("tiny", "--runs", finished.parent)
    pair = (world / "target", finished / "draft")
    command, begun, texts = ("generate", "def alpha(", "--tokens", 24), [], []
    options = ((), *(("-C", one) for one in ("drafter=tree", "drafter=lookup+draft", "length=4", "length=0")))
    for where in (run, pair):
        for more in options:
            assert tiny.call(*command, *where, *more) == 0
            found = capsys.readouterr()
            texts.append(found.out)
            begun += re.findall(r"drafts (\d+) tokens? a round, the fastest", found.err)
            assert "tok/s" in found.err and ("tokens/round" in found.err) == (more != ("-C", "length=0"))
    assert len({*texts}) == 1 and texts[0].startswith("def alpha(") and len(texts[0]) > 30
    report = read_result(finished / "speedup.json", SpeedupReport)
    assert begun[0] == str(report.fastest_of_backends["pytorch"].length)
    for more in ("verifier=block", "verifier=match", "drafter=tree"):
        said = tiny.shown(capsys, *command, *run, "--sampler", "temperature=.9,top_k=50", "-C", more)
        assert said.startswith("def alpha(")
    stop = texts[0][len("def alpha(") :].strip("\n")[3:6]
    said = tiny.shown(capsys, *command, *run, "--stop", stop)
    assert stop not in said[len("def alpha(") :] and texts[0].startswith(said.rstrip("\n"))


def test_profile(copied: Path, tmp_path: Path, capsys: Capture) -> None:
    options = ("--depths", "8,16", "--max-tokens", 3, "--repeats", 5, "--threads", 1)
    said = tiny.shown(capsys, "profile", copied / "draft", *options, "--out", tmp_path / "c.json")
    assert said.count("\n| 8 |") == 3 == said.count("\n| 16 |")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert saved["depths"] == [8, 16] and len(saved["seconds"][0]) == 3
    said = tiny.shown(capsys, "profile", copied / "draft", *options, "--pytorch", "static=true", "--dtype", "bfloat16")
    assert "draft, static cache, bfloat16, pytorch" in said


def test_profile_of_types(gguf_toys: tuple[Path, Path], capsys: Capture) -> None:
    options = ("--types", "q8_0,f16", "--repeats", 5, "--threads", 1, "--output", "json")
    report = json.loads(tiny.shown(capsys, "profile", gguf_toys[0], *options))
    rows = [row for row in report if row["library"] == "llama.cpp"]
    assert [row["type"] for row in rows] == ["f32", "q8_0 (from f32)", "f16 (from f32)"]
    assert rows[0]["KL"] == 0 < rows[2]["KL"] < rows[1]["KL"] < 0.1
    assert all(row[f"T({m})/T(1)"] > 0 for row in rows for m in (2, 3, 4, 6, 8))
    own = [row for row in report if row["library"] == "PyTorch"]  # where there is a kernel, and a type it multiplies by
    assert all(row["type"] == "q8_0 (from f32)" and abs(row["KL"] - rows[1]["KL"]) < 0.02 for row in own)
    assert [len(row["length"].split("/")) for row in report] == [4] * len(report)
    table = tiny.shown(capsys, "profile", gguf_toys[0], *options[:-2])
    assert table.startswith("Fastest at a KL of at most 0.01: ") and table.count("(from f32)") >= 2
    curve = ("--repeats", 5, "--threads", 1, "--max-tokens", 2, "--depths", 8)
    beside = tiny.shown(capsys, "profile", gguf_toys[0], *curve)
    assert beside.startswith("Fastest at") and "(from" not in beside and "| 8 | 2 |" in beside
    assert "libraries and types" not in tiny.shown(capsys, "profile", gguf_toys[0], *curve, "--llama", "ub=8")


def test_a_draft_of_another_vocabulary_as_it_is(world: Path, tmp_path: Path, capsys: Capture) -> None:
    tiny.build_model(tmp_path, layers=2, vocabulary=350, seeds=range(40, 60))
    pair = (world / "target", tmp_path, "--tokens", 10)
    for temperature in (0, 0.8):
        options = ("-C", "drafter=string", "--temperature", temperature)
        assert tiny.shown(capsys, "generate", "def alpha(", *pair, *options).startswith("def alpha(")
    # A drafter that reads the draft's ids as the target's own.
    assert "does not fit the target" in tiny.refused(capsys, "generate", "def alpha(", *pair, "-C", "drafter=draft")
    assert "drafter=string" in tiny.refused(capsys, "generate", "def alpha(", *pair)


# ── what goes to stderr ──


def test_quiet_leaves_results_warnings_and_errors(world: Path, copied: Path, capsys: Capture) -> None:
    (copied / "stages" / "report.json").unlink()
    (copied / "log.txt").unlink()
    assert tiny.call("-q", "train", world / "recipe.yaml", "--runs", copied.parent) == 0
    shown = capsys.readouterr()
    assert "report.html" in shown.out
    assert "up to date" not in shown.err and "writing to" not in shown.err and "report: " not in shown.err, shown.err
    logged = (copied / "log.txt").read_text()
    assert "eval: up to date" in logged and "report: done" in logged
    warning = read_result(copied / "training.json", TrainingSummary).warning
    assert (warning in shown.err) if warning else not shown.err
    assert "there is no run" in tiny.refused(capsys, "--quiet", "eval", "none", "--runs", copied.parent)
    assert "tok/s" in tiny.told(capsys, "generate", "def", "--runs", copied.parent, "--tokens", "2")
    said = tiny.told(capsys, "-q", "generate", "def", "--runs", copied.parent, "--tokens", "2")
    assert not said, "of the last command, not of one before"


def test_a_terminal_shows_one_line_for_each_stage(
    world: Path, copied: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """With its time and one figure; everything else is in log.txt, and on the terminal with -v."""
    (copied / "log.txt").unlink()
    command = ("train", world / "recipe.yaml", "--runs", copied.parent, "--redo", "eval")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    said = tiny.told(capsys, *command).replace(ERASE, "\n")
    lines = [line for line in said.splitlines() if line.startswith("✓ ")]
    assert [line.split()[1] for line in lines] == [*tiny.STAGES]
    figures = {line.split()[1]: line[21:] for line in lines}
    assert figures["answers"] == "up to date" and re.fullmatch(r"acceptance 0\.\d\d \[.*\]", figures["eval"])
    logged = (copied / "log.txt").read_text()
    assert "eval: runs" in logged and "eval: done in" in logged and "eval: runs" not in said
    assert "eval: runs" in tiny.told(capsys, "-v", *command)
    run = Run(copied, load_recipe(copied / "config.yaml"))
    shown = {stage: stage_figure(stage, run) for stage in tiny.STAGES}
    assert re.fullmatch(r"12 answers, \d+ tokens", shown["answers"]) and all(shown.values()), shown
    assert re.fullmatch(r"acceptance 0\.\d\d → 0\.\d\d", shown["train"])
    assert re.fullmatch(r"[\d.]+ tokens/s instead of [\d.]+", shown["speedup"])


def test_verbose_adds_what_the_libraries_log(copied: Path, capsys: Capture) -> None:
    command = ("generate", "def", copied / "gguf" / "target-f16.gguf", "-C", "length=0", "--tokens", "2")
    assert "llama.cpp:" not in tiny.told(capsys, *command)
    said = tiny.told(capsys, "-v", *command)
    assert "llama.cpp: " in said and "tok/s" in said
    assert tiny.call("-v", "-q", *command) == 2


def test_verbose_shows_the_traceback_of_a_bug(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr("distill.cli.shared.read_recipe", lambda *_: 1 / 0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert tiny.call("-v", "check", "x.yaml") == 1 and "Traceback" in capsys.readouterr().err


def test_a_command_says_where_it_writes_before_it_does(world: Path, copied: Path, tmp_path: Path) -> None:
    """Once each, and at a moment when there is nothing yet."""
    target, out = world / "target", tmp_path / "out"
    commands = {
        ("train", world / "recipe.yaml", "--runs", out / "runs", "--until", "corpus"): out / "runs" / "tiny",
        ("transplant", target, target, out / "transplant"): out / "transplant",
        ("cut", target, out / "cut", "--text", world / "corpus" / "test", "--layers", "2"): out / "cut",
        ("export-gguf", target, "--to", out / "gguf", "--outtype", "f16"): out / "gguf",
        ("profile", target, "--max-tokens", "2", "--repeats", "5", "--out", out / "curve.json"): out / "curve.json",
    }
    for arguments, place in commands.items():
        seen: list[bool] = []

        class Watched(io.StringIO):
            def write(self, text: str, place: Path = place, seen: list[bool] = seen) -> int:
                if f"writing to {place}" in text:
                    seen.append(place.exists())
                return super().write(text)

        with contextlib.redirect_stderr(Watched()):
            assert tiny.call(*arguments) == 0, arguments
        assert seen == [False] and place.exists(), arguments


def test_completion_of_the_shell() -> None:
    asked = {"_DISTILL_COMPLETE": "complete_bash", "COMP_WORDS": "distill train --unt", "COMP_CWORD": "2"}
    command = [sys.executable, "-m", "distill"]
    assert subprocess.check_output(command, cwd=tiny.ROOT, env=os.environ | asked, text=True).split() == ["--until"]
