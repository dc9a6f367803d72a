"""Every option of every command, in every mode: it changes what the command does, or it is refused by name."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any, Literal, get_args, get_origin
from unittest.mock import MagicMock

import pytest
from test_plan import straight
from tiny import Capture, Patch
from typer.main import get_command

from distill.cli.app import COMMANDS as FUNCTIONS
from distill.cli.app import app
from distill.cli.check import Finding
from distill.cli.measure import PairFiles
from distill.decoding.costs import CostCurve, load_cost_curve, save_cost_curve
from distill.errors import DistillError
from distill.recipe import dump_recipe, load_recipe
from distill.run import Run

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
MODES = {
    "doctor": "",
    "doctor of the cache": "--clear all",
    "recipes": "",
    "recipes to copy": "demo",
    "check of a recipe": "RECIPE",
    "check of a pair": "TARGET TARGET",
    "plan of a recipe": "RECIPE",
    "plan of two models": "TARGET TARGET",
    "plan of two files": "FILE FILE",
    "plan of a model": "TARGET 0.1",
    "plan of a file": "FILE 0.1",
    "plan of a curve": "CURVE 0.1",
    "plan of two curves": "CURVE CURVE",
    "profile of a folder": "TARGET",
    "profile of a file": "FILE",
    "profile of types": "FILE --types f16",
    "train": "RECIPE",
    "train a sweep": "RECIPE --sweep seed=3,4",
    "train a rehearsal": "RECIPE --rehearse",
    "train again": "RECIPE --refresh",
    "generate of a run": "hello RUN",
    "generate of two models": "hello TARGET TARGET",
    "generate of a file alone": "hello FILE -C drafter=lookup",
    "generate of a table": "hello TARGET -C drafter=table",
    "chat of a run": "RUN",
    "chat of two models": "TARGET TARGET",
    "serve of a run": "RUN",
    "serve of two files": "FILE FILE",
    "eval of a run": "RUN",
    "eval of a run's types": "RUN --types f16",
    "eval of two models": "TARGET TARGET --prompts TEXT",
    "eval of two files": "FILE FILE --suite TEXT",
    "eval of types": "TARGET TARGET --prompts TEXT --types f16",
    "speedup of a run": "RUN",
    "speedup of a run on prompts": "RUN --prompts TEXT",
    "speedup of two models": "TARGET TARGET --prompts TEXT",
    "speedup of two files and a table": "FILE FILE --prompts TEXT -C drafter=table",
    "speedup of a suite": "TARGET --suite TEXT",
    "export-gguf of a folder": "MODEL --to FOLDER",
    "export-gguf of a run": "RUN --to FOLDER",
    "export-gguf without a check": "MODEL --no-check --to FOLDER",
    "export-lookup": "RUN",
    "import-gguf": "FILE FOLDER/new",
    "transplant": "TARGET TARGET FOLDER/new",
    "cut": "TARGET FOLDER/new --text TEXT",
    "serve-check of a server to start": "RUN --server TEXT --sampler temperature=1",
    "serve-check of a pair on prompts": "FILE FILE --server TEXT --prompts TEXT --sampler temperature=1",
    "serve-check of a running server": "RUN --url http://127.0.0.1:1 --sampler temperature=1",
    "record": "--upstream http://127.0.0.1:1 --to FOLDER",
    "report": "RUN",
    "report of two runs": "RUN RUN",
    "runs": "",
}
# Values of options that take text; any other option gets a word. Numbers, words of a list and flags follow from typer.
VALUES = {
    "acceptance": "0.5",
    "clear": "weights",
    "concurrency": "2",
    "configuration": "length=3",
    "depth": "300",
    "depths": "8,9",
    "grammar": "TEXT",
    "history": "FOLDER/history.json",
    "imatrix": "TEXT",
    "lengths": "3",
    "llama": "ub=8",
    "llama_draft": "ub=8",
    "on": "1 x H100, 1 x H100",
    "outtype": "q4_0",
    "prompt_tokens": "32",
    "prompts": "OTHER",
    "pytorch": "prepack=false",
    "redo": "eval",
    "sampler": "temperature=0.5",
    "suite": "OTHER",
    "swap": "1,2,0.5",
    "sweep": "seed=1,2",
    "tensor_type": "token_embd=q4_0",
    "text": "OTHER",
    "types": "q8_0",
    "until": "cut",
    "upstream": "http://127.0.0.1:9999",
}
# The functions that commands ask for the work. Each notes how it was called.
WORK = (
    *("cli.shared.prepare", "cli.shared.run_until", "cli.shared.print_blocks", "cli.shared.require_draft"),
    *("cli.plan.measured_curve", "cli.plan._engines", "cli.measure.read_result", "cli.measure._print_report"),
    *("cli.measure.files_of_run", "cli.measure._show", "cli.measure.prompts_of_files", "cli.measure.prompts_of_run"),
    *("cli.measure.room_of", "cli.measure.template_of", "cli.measure.predicted_acceptance"),
    *("cli.models._print", "cli.models._served", "cli.models.report_lines", "cli.models.read_utf8"),
    *("cli.runs._make", "cli.runs._rehearse", "cli.runs._check", "cli.runs._move_aside", "cli.runs._beside"),
    *("cli.runs.copy_file", "cli.runs._best_of", "cli.generate._fastest", "cli.shared.read_texts"),
    *("pipeline.preflight.preflight", "pipeline.preflight.expected_stages", "pipeline.preflight.expected_lines"),
    *("pipeline.running.plan_run", "pipeline.running.plan_refresh", "pipeline.running.start_refresh"),
    *("pipeline.sweep.require_alike", "planning.hardware.hardware_lines", "planning.cases.measured_cases"),
    *("planning.order.decide", "planning.order.measured_acceptance", "planning.order.advice"),
    *("engines.pairs.compare_pair", "engines.torch.hugging_face.offline", "engines.torch.hugging_face.local_folder"),
    *("engines.pairs.require_drafts", "engines.loaded.context_of"),
    *("decoding.costs.save_cost_curve", "measuring.evaluation.evaluate_types", "serving.terminal.stream"),
    *("serving.terminal.converse", "measuring.speedup_tables.speedup_blocks", "serving.completions.serve"),
    *("serving.check.check_started", "serving.check.check_addresses", "serving.server.require_binary"),
    *(
        "serving.server.LlamaServer.has",
        "serving.history.compared",
        "serving.history.not_compared",
        "serving.history.keep",
    ),
    *("serving.history.read_history", "data.recorder.record", "data.recorder.summary", "data.prompts.user_message"),
    *("gguf.writer.export_files", "gguf.importing.read_import", "gguf.importing.write_import", "export.importance_of"),
    *("export.compare", "export.faults_of", "export.origins", "export.check_texts", "export.Original.open"),
    *("decoding.lookup_files.export_lookup", "surgery.vocabulary.transplant", "surgery.vocabulary.folders_of"),
    *("report.card.report", "run.Run.verify", "run.Run.outdated", "run.Run.can_be_written"),
    *("api.evaluate", "api.measure_speedup", "api.cut"),
)
ALSO_DONE = (
    "cli.shared.find_run",
    "engines.loaded.settled_decoding",
    "pipeline.sweep.combinations",
    "pipeline.preflight.shortened",
)
Notes = list[str]


def described(value: Any) -> str:
    """A value in words, in which two equal ones do not differ."""
    if isinstance(value, Run):
        return f"run {value.folder} {value.whole} {value.silent}"
    return re.sub(r"(at 0x|id=')\w+", "", repr(value))


@pytest.fixture(name="place")
def _place(world: Path, gguf_toys: tuple[Path, Path], tmp_path: Path, monkeypatch: Patch) -> dict[str, Path]:
    """Return the files that the words of the modes name. The run holds only a recipe."""
    recipe = load_recipe(world / "recipe.yaml")
    found = {
        "TARGET": world / "target",
        "FILE": gguf_toys[0],
        "RECIPE": world / "recipe.yaml",
        "FOLDER": tmp_path / "to",
    }
    found |= {"RUN": tmp_path / "runs" / "tiny", "CURVE": tmp_path / "curve.json"}
    for name in ("TEXT", "OTHER"):
        found[name] = tmp_path / name.lower()
        found[name].write_text(name)
    found["RUN"].mkdir(parents=True)
    (found["RUN"] / "draft").mkdir()
    (found["RUN"] / "config.yaml").write_text(dump_recipe(recipe))
    steps = ((2.0, 2.2, 2.4, 2.6, 2.8), (3.0, 3.2, 3.4, 3.6, 3.8))
    save_cost_curve(CostCurve("big", "x", (64, 256), steps, 5, "seconds"), found["CURVE"])
    found["MODEL"] = shutil.copytree(world / "target", tmp_path / "model")
    monkeypatch.setenv("DISTILL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return found


@pytest.fixture(name="notes")
def _notes(place: dict[str, Path], monkeypatch: Patch) -> Notes:
    """Return the calls of the functions that do the work. Stand-ins take these calls."""
    notes: Notes = []
    run = Run(place["RUN"], load_recipe(place["RECIPE"]))
    file = place["FILE"]
    answers: dict[str, Callable[[], Any]] = {
        "cli.plan.measured_curve": lambda: load_cost_curve(place["CURVE"]),
        "cli.plan._engines": lambda: ["engines"],
        "cli.measure.files_of_run": lambda: PairFiles(file, file, (file, file), run),
        "cli.measure.prompts_of_files": lambda: ([MagicMock(prompt=[1])], {}),
        "cli.measure.prompts_of_run": lambda: ([MagicMock(prompt=[1])], {}),
        "cli.measure.room_of": lambda: 9,
        "cli.shared.require_draft": lambda: None,
        "cli.generate._fastest": lambda: None,
        "planning.cases.measured_cases": lambda: iter([straight(0.1, 0.1)]),
        "planning.order.decide": lambda: ["decided"],
        "planning.order.advice": lambda: "advised",
        "planning.order.measured_acceptance": lambda: MagicMock(rates=[0.5]),
        "engines.pairs.require_drafts": lambda: (str(place["TARGET"]), str(place["TARGET"])),
        "engines.torch.hugging_face.local_folder": lambda: place["TARGET"],
        "data.recorder.summary": lambda: "recorded",
        "data.prompts.user_message": lambda: None,
        "gguf.writer.export_files": lambda: [MagicMock()],
        "export.faults_of": lambda: [],
        "pipeline.running.plan_run": lambda: [],
        "pipeline.sweep.require_alike": lambda: None,
        "pipeline.preflight.preflight": lambda: MagicMock(lines=[], skipped=[], prompts=9),
        "pipeline.preflight.expected_stages": lambda: ([], ""),
        "run.Run.outdated": lambda: False,
    }
    import distill.api  # noqa: F401

    for name in (*WORK, *ALSO_DONE):
        place_of, _, attribute = f"distill.{name}".rpartition(".")
        try:
            owner: Any = importlib.import_module(place_of)
        except ModuleNotFoundError:  # a class
            module, _, kind = place_of.rpartition(".")
            owner = getattr(importlib.import_module(module), kind)
        original = getattr(owner, attribute)

        def noted(*given: Any, _name: str = name, _original: Any = original, **named: Any) -> Any:
            kept = [described(one) for one in given] + [f"{key} {described(one)}" for key, one in named.items()]
            notes.append(f"{_name}: {', '.join(kept)}")
            if _name in ALSO_DONE:
                return _original(*given, **named)
            return answers.get(_name, MagicMock)()

        monkeypatch.setattr(owner, attribute, noted)
    monkeypatch.setattr("typer.launch", lambda page: notes.append(f"shown: {page}"))
    for name in ("_torch", "_llama", "_smollm2", "_memory"):
        monkeypatch.setattr(f"distill.cli.check.{name}", lambda: Finding("x", "y"))
    for name in ("_ik", "_cores"):
        monkeypatch.setattr(f"distill.cli.check.{name}", lambda: [])
    monkeypatch.setattr("shutil.disk_usage", lambda place: MagicMock(free=10**10))
    return notes


def word_of(name: str, option: Any) -> list[str]:
    """An option of the command `name`, with a value that is not its default."""
    annotation = signature(FUNCTIONS[name], eval_str=True).parameters[option.name].annotation
    kinds = [kind for kind in (annotation, *get_args(annotation)) if kind is not type(None)]
    literal = next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())
    default = option.default
    if bool in kinds:
        return [option.secondary_opts[0] if option.secondary_opts and default is not False else option.opts[-1]]
    if option.name in VALUES:
        value: Any = VALUES[option.name]
    elif literal:
        value = [one for one in literal if one not in (default, "schema")][-1]
    elif int in kinds or float in kinds:
        step = 0.25 if float in kinds else 1
        value = (option.min or 0) + step if default is None else default + step
        value = default - step if option.max is not None and value > option.max else value
    else:
        value = "x"
    return [option.opts[0], str(value)]


@pytest.mark.parametrize("mode", MODES)
def test_every_option_has_an_effect_or_is_refused(
    mode: str, place: dict[str, Path], notes: Notes, capsys: Capture
) -> None:
    command = COMMANDS[mode.split()[0]]

    def outcome(option: Any = None) -> tuple[str, ...]:
        """Return what the command requested and printed, with or without an option."""
        for path in (place["FOLDER"], place["RUN"] / "lookup"):
            shutil.rmtree(path, ignore_errors=True)
        Path("demo.yaml").unlink(missing_ok=True)  # which `distill recipes demo` writes
        for path in (place["FOLDER"], Path("cache/weights"), Path("cache/batches")):
            path.mkdir(parents=True, exist_ok=True)
        words = [*MODES[mode].split(), *([] if option is None else word_of(mode.split()[0], option))]
        for name, path in place.items():
            words = [re.sub(rf"^{name}\b", str(path), word) for word in words]
        notes.clear()
        try:
            code = command.main(words, standalone_mode=False)
        except DistillError as error:
            code = f"{type(error).__name__}: {error.what}"
        except Exception as error:  # a function that did no work gave nothing to go on with
            code = f"{type(error).__name__}: {described(error)}"
        return (*notes, re.sub(r"id='\d+'", "", capsys.readouterr().out), str(code))

    base, faults = outcome(), []
    if (len(base) == 2 and not base[0]) or base[-1].startswith(("RecipeError", "RunError", "DataError")):
        faults.append(f"without an option: {base}")
    assert outcome() == base  # so that a difference comes from the option
    names_no_run = not {"RUN", "RECIPE"} & {*MODES[mode].split()} and mode not in ("doctor", "runs")
    for option in command.params:
        if option.param_type_name != "option" or option.name == "help" or (option.name == "runs" and names_no_run):
            continue
        if option.name == "overwrite" or {*option.opts, *option.secondary_opts} & {
            *MODES[mode].split()
        }:  # which replaces files, and a mode's
            continue
        if option.name == "kl" and "--types" in MODES[mode]:  # the default there
            continue
        found, words = outcome(option), " ".join(word_of(mode.split()[0], option))
        if found == base:
            faults.append(f"{words} changes nothing: {found[-1][:150]}")
        elif "without effect" in found[-1] and not any(name in found[-1] for name in option.opts):
            faults.append(f"{words} is not named: {found[-1]}")
    assert not faults, "\n".join(faults)


def test_every_command_has_a_mode() -> None:
    assert {mode.split()[0] for mode in MODES} == {*COMMANDS}
