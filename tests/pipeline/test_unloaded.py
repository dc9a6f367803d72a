"""Runs that never load the target: whole runs from a GGUF file and from a server, and what they refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import unloaded_worlds
from killed_runs import run_jobs
from tiny import Capture, Patch
from torch import Tensor
from trainings import two_processes

from distill.data.packing import Packed, repeated_next
from distill.data.samples import read_samples
from distill.engines.torch import hugging_face
from distill.engines.torch.hugging_face import load_model, load_target, load_tokenizer, text_folder
from distill.errors import RecipeError, RunError
from distill.measuring.evaluation import METRICS, position_metrics, stored_metrics
from distill.pipeline.stages import STAGES, key_parts
from distill.recipe import Recipe, Target, load_recipe, parse_recipe
from distill.run import Run
from distill.sampler import Sampler
from distill.teacher.distributions import TeacherChunk, compress
from distill.teacher.store import TeacherStore, held_out
from distill.training.validation import stored_chances

torch.set_num_threads(1)

CPU = torch.device("cpu")
SERVED = Sampler(temperature=0.3, top_p=0.95)
NOT_RUN = "the target's weights are not loaded (target.load: false)"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with tiny.one_thread():
        return unloaded_worlds.build(tmp_path_factory.mktemp("unloaded"))


def loaded(folder: Path) -> Any:
    return load_model(str(folder), "float32", CPU)


@pytest.fixture(scope="module")
def from_file(place: Path) -> Iterator[Path]:
    """A finished run whose answers and distributions come from the GGUF file."""
    recipe = tiny.write_recipe(place / "file.yaml", unloaded_worlds.values(place) | {"name": "file"})
    with tiny.one_thread():
        assert tiny.call("train", recipe, "--runs", place / "runs") == 0
        yield place / "runs" / "file"


@pytest.fixture(scope="module")
def from_server(place: Path) -> Iterator[Path]:
    """A finished run whose answers, sampled at another temperature than 1, and log-probabilities come from a server."""
    values = unloaded_worlds.values(place) | {"name": "server"}
    settings: Any = {"tokenizer": load_tokenizer(str(place / "target")), "max_logprobs": 400, "context": 512}
    server = unloaded_worlds.AnsweringServer(loaded(place / "whole"), **settings)
    with server.running(), tiny.one_thread():
        urls = {"urls": [server.url], "model": "target"}
        values["answers"]["writer"] = urls
        values["teacher"] = {"server": urls, "top_k": 200, "shard_blocks": 8}
        values["sampler"] = {"temperature": SERVED.temperature, "top_p": SERVED.top_p}
        values["train"] |= {"protocol": "match"}
        recipe = tiny.write_recipe(place / "server.yaml", values)
        assert tiny.call("train", recipe, "--runs", place / "runs") == 0
        yield place / "runs" / "server"


@pytest.fixture(params=["from_file", "from_server"])
def either(request: pytest.FixtureRequest) -> Path:
    """Each of the two runs."""
    found: Path = request.getfixturevalue(request.param)
    return found


def opened(run: Path) -> tuple[Recipe, Run]:
    recipe = load_recipe(run / "config.yaml")
    return recipe, Run(run, recipe)


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read(*parts: Any) -> Any:
    return json.loads(Path(*parts).read_text())


# ── whole runs ──


def test_a_whole_run_without_weights(either: Path, capsys: Capture) -> None:
    """Every stage up to the report, except those that time the target; each says what it did instead."""
    run = either
    stages = {path.stem for path in (run / "stages").glob("*.json")}
    assert stages == {"validation", "test", *tiny.STAGES} - {"speedup"}
    assert sorted(path.suffix for path in (run / "gguf").iterdir()) == [".gguf", ".json"], "the draft's file alone"
    log = (run / "log.txt").read_text()
    assert f"speedup: not run: {NOT_RUN}" in log and f"no rounds are decoded: {NOT_RUN}" in log
    measure = "acceptance probability on stored distributions"
    page, card = (run / "report.html").read_text(), (run / "draft" / "README.md").read_text()
    assert "The stage <code>speedup</code> was not run: the target&#x27;s weights" in page
    assert "The stage `speedup` was not run: the target's weights" in card and measure in card
    for text in (page, card):
        assert "These distributions hold at temperature 1" in text and "sampled answers" in text
    assert "no rounds were decoded" in page and "has not run" not in page
    best = read(run, "training.json")["best"]
    assert best["measure"] == measure and 0 < best["acceptance"] <= best["most"] <= 1
    evaluated = [line for line in opened(run)[1].metrics() if line["stage"] == "acceptance"]
    assert [line["step"] for line in evaluated] == [0, 4, 8], "at every `acceptance.every` steps"
    assert best["acceptance"] == max(line["acceptance"] for line in evaluated)
    report = read(run, "eval.json")
    assert report["positions"] == {} and report["tokens_per_round"] == {}
    assert {one["label"] for one in report["groups"] if one["of"] == "class"} == {"back", "front"}
    assert (
        sum(one["tokens"] for one in report["groups"] if one["of"] == "class")
        == report["domains"]["answers"]["after"]["tokens"]
    )
    rows = tiny.shown(capsys, "eval", run, "-o", "csv")
    assert "answers,share of the sampled answers' tokens that are the draft's argmax," in rows
    assert 'answers,"acceptance probability, rejection sampling",' in rows
    assert f"| {run.name} | finished |" in tiny.shown(capsys, "runs", "--runs", run.parent)


def test_held_out_tokens_add_up(from_file: Path) -> None:
    """Answers, stores and report count the same tokens; nothing held out is learnt from."""
    recipe, run = opened(from_file)
    train = TeacherStore(run).packed.take(slice(None))
    rows = list(zip(train.ids, train.documents, strict=True))
    learnt = {tuple(ids[documents == n].tolist()) for ids, documents in rows for n in range(99)}
    for split, prompts in (("validation", 2), ("test", 12)):
        texts = held_out(recipe, run, split)  # type: ignore[arg-type]
        lines = [line for path in sorted((from_file / split).glob("answers-*")) for line in read_samples(path, split)]
        assert len(lines) == len(texts.answers) == prompts
        tokens = sum(len(line.answer) for line in lines)
        summary, manifest = read(from_file, split, "summary.json"), read(from_file, split, "manifest.json")
        assert summary["answer_tokens"] == tokens == int(texts.own.mask.sum())
        assert sum(one["tokens"] for one in summary["by_class"].values()) == tokens
        assert manifest["scored_positions"] == tokens + int(texts.given.mask.sum())
        assert manifest["k"] == 200 and manifest["mass"] is None, "every entry, also where fewer hold teacher.mass"
        assert not {tuple(line.prompt + line.answer) for line in lines} & learnt
    own, given = (read(from_file, "eval.json")["domains"][name]["after"] for name in ("answers", "files"))
    assert (own["tokens"], own["prompts"], given["tokens"]) == (tokens, 12, int(texts.given.mask.sum()))


# ── against whole distributions ──


def reference(model: Any, blocks: Packed) -> Tensor:
    """Logits [N, V] in fp64 at the scored positions: each document alone, by transformers, without our masks."""
    model, rows = model.double(), []
    with torch.inference_mode():
        for ids, documents, mask in zip(blocks.ids, blocks.documents, blocks.mask, strict=True):
            for number in range(int(documents.max()) + 1):
                here = documents == number
                if bool(mask[here].any()):
                    rows.append(model(input_ids=ids[here].long().unsqueeze(0)).logits[0][mask[here]])
    return torch.cat(rows)


def exact_means(target: Tensor, draft: Tensor) -> dict[str, float]:
    """The measures from logits [N, V] in fp64, written out."""
    p, q = target.softmax(-1), draft.softmax(-1)
    best = q.argmax(-1)
    few = draft.masked_fill(draft < draft.sort(-1).values[:, -10:-9], -torch.inf).softmax(-1)
    found = {
        "forward_kl": (p * (p.log() - q.log())).sum(-1),
        "acceptance_sampling": torch.minimum(p, q).sum(-1),
        "acceptance_drawn": torch.minimum(p, few).sum(-1),
        "acceptance_match": p.gather(-1, best.unsqueeze(-1)).squeeze(-1),
        "acceptance_greedy": (p.argmax(-1) == best).double(),
    }
    return {name: float(values.mean()) for name, values in found.items()}


def test_the_bounds_hold_the_exact_figures(either: Path, place: Path) -> None:
    """Of both drafts, in both domains. A GGUF file in f32 has llama.cpp's own rounding (`noise`)."""
    noise, run, widths = 2e-3 if either.name == "file" else 1e-5, either, list[float]()
    texts = held_out(*opened(run), "test")
    target, report = loaded(place / "whole"), read(run, "eval.json")
    for domain, blocks in (("answers", texts.own), ("files", texts.given)):
        expected = reference(target, blocks)
        for side, folder in (("before", "cut"), ("after", "draft")):
            exact = exact_means(expected, reference(loaded(run / folder), blocks))
            for name, value in exact.items():
                bounds = report["stored"]["bounds"][domain][side][name]
                assert bounds["least"] - noise <= value <= bounds["most"] + noise, (domain, side, name)
                shown = report["domains"][domain][side][name]
                assert shown["low"] - noise <= bounds["least"] and bounds["most"] <= shown["high"] + noise
                assert shown["mean"] == pytest.approx((bounds["least"] + bounds["most"]) / 2)
                widths.append(bounds["most"] - bounds["least"])
            assert report["stored"]["bounds"][domain][side]["reverse_kl"] == {"least": None, "most": None}
    assert max(widths) < 0.3 and min(widths) < 1e-9, "bounds that say something"


def test_weights_are_chosen_by_the_exact_acceptance(either: Path, place: Path) -> None:
    recipe, run = opened(either)
    own, measure = held_out(recipe, run, "validation").own, {"file": "sampling", "server": "match"}[either.name]
    line = next(line for line in run.metrics() if line["stage"] == "acceptance" and line["step"] == 0)
    exact = exact_means(reference(loaded(place / "whole"), own), reference(loaded(either / "cut"), own))
    assert line["positions"] == int(own.mask.sum())
    assert line["acceptance"] - 2e-3 <= exact[f"acceptance_{measure}"] <= line["most"] + 2e-3
    assert line["most"] - line["acceptance"] < 0.1


def test_the_cut_is_compared_on_the_store(from_server: Path, place: Path) -> None:
    """The KL of the finished cut lies below the exact one (one bucket for the rest) and close to it."""
    recipe, run = opened(from_server)
    blocks = TeacherStore(run, "validation").packed.take(slice(0, recipe.cut.score_blocks))  # its own answers first
    target, draft = reference(loaded(place / "whole"), blocks), reference(loaded(from_server / "cut"), blocks)
    close = read(from_server, "cut", "cut.json")["changes"][-1]["close_after"]
    exact, found, seen = exact_means(target, draft), close["kl"], repeated_next(blocks)
    equal = target.argmax(-1) == draft.argmax(-1)
    for kind, here in (("new", ~seen), ("repeated", seen)):
        assert close["agreement"][kind] == pytest.approx(float(equal[here].double().mean()), abs=2 / int(here.sum()))
    assert exact["forward_kl"] - 0.05 < found < exact["forward_kl"] + 1e-3


def test_sampled_answers_estimate_the_match_protocol(from_server: Path, place: Path) -> None:
    """At the served sampler, which is not that of the store: the share agrees with the exact p(argmax q) there, and not
    with that at temperature 1."""
    recipe, run = opened(from_server)
    own = held_out(recipe, run, "test").own
    target, draft = reference(loaded(place / "whole"), own), reference(loaded(from_server / "draft"), own)
    best = draft.argmax(-1, keepdim=True)
    share = read(from_server, "eval.json")["stored"]["sampled"]["after"]
    assert share["mean"] == pytest.approx(float((own.labels()[own.mask] == best.squeeze(-1)).double().mean()))
    served = SERVED.probabilities(target).gather(-1, best).squeeze(-1)
    error = float((served * (1 - served)).sum()) ** 0.5 / len(served)
    assert abs(share["mean"] - float(served.mean())) < 4 * error
    hot = target.softmax(-1).gather(-1, best).squeeze(-1)
    assert abs(share["mean"] - float(hot.mean())) > 4 * error


VOCABULARY = 90


def made_chunk(logits: Tensor, k: int) -> TeacherChunk:
    """The entries as a store holds them."""
    found = compress(logits.clone(), k, VOCABULARY)
    assert found.ids is not None
    return TeacherChunk(found.ids.long(), found.log_probabilities.half().float(), found.log_tail)


@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("k", [1, 16, 64, VOCABULARY - 1])
def test_every_position_lies_within_its_bounds(k: int, trimmed: bool) -> None:
    """Random pairs, near and far, sharp and flat: the exact figures of position_metrics in fp64."""
    generator = torch.Generator().manual_seed(k)
    target = torch.randn(600, VOCABULARY, generator=generator) * torch.rand(600, 1, generator=generator) * 8
    draft = target + torch.randn(600, VOCABULARY, generator=generator) * torch.rand(600, 1, generator=generator) * 3
    if trimmed:
        draft[:, 1::3] = -torch.inf
    exact = position_metrics(target.double(), draft.double(), Sampler(), VOCABULARY).double()
    least, most = (found.double() for found in stored_metrics(made_chunk(target, k), draft))
    for column, name in enumerate(METRICS):
        low, high, value = least[:, column], most[:, column], exact[:, column]
        if name == "reverse_kl" or (trimmed and name == "forward_kl"):
            assert bool(low.isnan().all() and high.isnan().all())
            continue
        assert bool((low - 2e-6 <= value).all() and (value <= high + 2e-6).all()), name
        if name == "acceptance_sampling":
            other = value.roll(1)
            assert not bool(((low <= other) & (other <= high)).all()), "they do not hold just any value"
            assert k < VOCABULARY - 1 or float((high - low).max()) < 2e-2
    for protocol in ("sampling", "match", "greedy"):
        low, high = stored_chances(made_chunk(target, k), draft, protocol)  # type: ignore[arg-type]
        value = exact[:, METRICS.index(f"acceptance_{protocol}")]
        assert bool((low.double() - 4e-3 <= value).all() and (value <= high.double() + 4e-3).all()), protocol


# ── what needs the weights is refused ──

Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v: v["target"].update(quantise="int4"), "target.quantise and target.shard are for loaded weights"),
        (lambda v: v["answers"].pop("writer"), "answers.writer must name a GGUF file or servers"),
        (lambda v: v.update(teacher={"kind": "exact"}), "teacher.kind exact needs the weights: use compact"),
        (lambda v: v["teacher"].pop("gguf"), "teacher.gguf or teacher.server must give the distributions"),
        (
            lambda v: (v["answers"].pop("writer"), v["teacher"].pop("gguf"), v["cut"].pop("donor")),
            "answers.writer must name; teacher.gguf or teacher.server; cut.donor is the target itself: name another",
        ),
        (lambda v: v["cut"].update(donor=v["target"]["model"]), "cut.donor is the target itself"),
        (lambda v: v["train"].update(acceptance=None), "train.acceptance is null: cuts and weights are chosen"),
    ],
)
def test_recipes_that_need_the_weights_are_refused(change: Change, expected: str, place: Path) -> None:
    values = unloaded_worlds.values(place)
    assert parse_recipe(values, "test").target.load is False
    change(values)
    with pytest.raises(RecipeError) as caught:
        parse_recipe(values, "test")
    assert all(words in str(caught.value) for words in (*expected.split("; "), "target.load is false"))
    values["target"]["load"] = True
    if "acceptance" not in expected and "writer" not in expected:  # the same means something where the target is loaded
        assert parse_recipe(values, "test").target.load


def test_no_command_loads_the_target(from_file: Path, place: Path, capsys: Capture) -> None:
    """Even where its weights are there: the one function that loads a recipe's target refuses."""
    with pytest.raises(RunError, match="the recipe says never to"):
        load_target(Target(model=str(place / "whole"), load=False), CPU)
    recipe, runs, no_part = place / "file.yaml", from_file.parent, "stage `speedup` is no part of this run"
    for arguments, expected in (
        (("speedup", from_file), f"{no_part}: the target's weights are not loaded"),
        (("train", recipe, "--runs", runs, "--until", "speedup"), no_part),
        (("train", recipe, "--runs", runs, "--redo", "speedup"), no_part),
        (("generate", "def f(", from_file), "the recipe says never to (target.load: false)"),
    ):
        said = tiny.refused(capsys, *arguments)
        assert expected in said, (arguments, said)
    said = tiny.told(capsys, "train", recipe, "--runs", runs, "--dry-run")
    assert f"speedup: not run: {NOT_RUN}" in said and "report: up to date" in said
    assert tiny.call("export-gguf", from_file, "--outtype", "f16", "--to", place / "extra") == 0
    assert [path.name for path in (place / "extra").glob("*.gguf")] == ["draft-f16.gguf"]
    for server in ("llama.cpp", "sglang", "vllm"):
        assert tiny.call("export-lookup", from_file, "--for", server, "--to", place / "extra" / server) == 0
        assert (place / "extra" / server).stat().st_size > 1000


def test_check_counts_no_weights_of_the_target(place: Path, capsys: Capture) -> None:
    recipe = tiny.write_recipe(place / "checked.yaml", unloaded_worlds.values(place))
    said = tiny.shown(capsys, "check", recipe)
    assert f"no weights of {place / 'target'} are read or downloaded" in said
    assert "not run: speedup, decoded rounds" in said and f"tensors of {place / 'donor'}" in said
    assert f"tensors of {place / 'target'}" not in said and "no rounds are decoded" in said
    where_needed = ("target.load=true", "answers.writer=null", "teacher.gguf=null")
    assert "has no weights" in tiny.refused(capsys, "check", recipe, *where_needed)


def test_only_small_files_of_a_hub_target_are_fetched(monkeypatch: Patch, tmp_path: Path) -> None:
    def download(name: str, allow_patterns: Any) -> str:
        assert (name, allow_patterns) == ("some/target", hugging_face.SMALL_FILES)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert text_folder("some/target") == tmp_path
    assert not any("safetensors" in pattern for pattern in hugging_face.SMALL_FILES)


def test_keys_of_runs_that_load_the_target_are_as_before(world: Path, finished: Path) -> None:
    """Their stages depend on nothing new, and they hear nothing of the others."""
    recipe, run = opened(finished)
    for stage in STAGES:
        parts = key_parts(stage, recipe, run)
        assert not [name for name in parts if name.startswith(("validation", "test", "target.load"))]
    assert "validation: " not in (finished / "log.txt").read_text().replace("  validation: ", "")
    assert tiny.call("train", world / "recipe.yaml", "--runs", finished.parent, "--until", "validation") == 2


# ── resuming ──


def kept(run: Path) -> dict[str, dict[str, str]]:
    return {
        name: tiny.contents(run / name, "README.md")
        for name in ("answers", "teacher", "validation", "test", "cut", "draft")
        if (run / name).exists()
    }


@pytest.mark.slow
def test_kills_leave_the_same_bytes(place: Path, from_file: Path, tmp_path: Path) -> None:
    """Copies of a finished run, as they stood behind stage `teacher`, die at moments spread over all that is written
    from the first held-out answer to the draft; the same command goes on."""

    def begun(name: str) -> list[str]:
        shutil.copytree(from_file, tmp_path / name, ignore=_after_teacher)
        return ["train", str(place / "file.yaml"), "--runs", str(tmp_path), f"name={name}", "--until", "train"]

    (outcome,) = run_jobs(tmp_path, [{"argv": begun("k")}])
    assert outcome["code"] == 0 and kept(tmp_path / "k") == kept(from_file)
    kills, last = 24, outcome["events"]
    commands = [begun(f"k{number}") for number in range(kills)]
    jobs = [
        job
        for number, argv in enumerate(commands)
        for job in ({"argv": argv, "event": 6 + (last - 6) * number // kills}, {"argv": argv})
    ]
    assert [one["code"] for one in run_jobs(tmp_path, jobs)] == [-9, 0] * kills
    assert all(kept(tmp_path / f"k{number}") == kept(from_file) for number in range(kills))
    logs = [path.read_text() for path in tmp_path.glob("k*/log.txt")]
    for split in ("validation", "test"):
        assert any(f"{split}: resumes" in log for log in logs), "among its answers or its shards"


def test_a_journal_that_a_kill_left_goes(place: Path, from_file: Path, tmp_path: Path) -> None:
    """Its file is whole: only the removal of the journal was cut off."""
    run = tmp_path / "file"
    shutil.copytree(from_file, run)
    for stage in ("answers", "test"):
        name = next((run / stage).glob("*-00000.arrow")).stem
        (run / stage / f".{name}.journal").write_text('{"id": "x"}\n')
        (run / "stages" / f"{stage}.begun.json").write_text(json.dumps(read(run, "stages", f"{stage}.json")["inputs"]))
        (run / "stages" / f"{stage}.json").unlink()
    assert tiny.call("train", place / "file.yaml", "--runs", tmp_path, "--until", "test") == 0
    assert kept(run) == kept(from_file) and not list(run.rglob(".*.journal"))


def _after_teacher(folder: str, names: list[str]) -> set[str]:
    """What a copy of a run leaves out, so that it stands behind stage `teacher`."""
    late = {"validation", "test", "cut", "checkpoints", "draft", "training.json"}
    if Path(folder).name == "stages":
        return {name for name in names if Path(name).stem not in ("corpus", "answers", "teacher")}
    return late & set(names) if (Path(folder) / "config.yaml").exists() else set()


def test_other_prompts_are_asked_without_new_training(place: Path, from_file: Path, tmp_path: Path) -> None:
    """More test prompts: the test store is made again, nothing else that is expensive."""
    run = tmp_path / "file"
    shutil.copytree(from_file, run)
    before = kept(run)
    assert tiny.call("train", place / "file.yaml", "--runs", tmp_path, "eval.prompts=16", "--until", "eval") == 0
    after = kept(run)
    assert read(run, "test", "summary.json")["answers"] == 16
    assert {name for name in before if before[name] != after[name]} == {"test"}


# ── served logs ──


def test_traffic_alone_without_a_writer(place: Path, tmp_path: Path) -> None:
    """What the target has answered is learnt from and, where its prompts are held out, measured on."""
    log = tmp_path / "served.jsonl"

    def serve(seeds: range) -> None:
        texts = [(tiny.document(seed), 100 + 7 * seed % 40) for seed in seeds]
        lines = [{"prompt": text[:40], "answer": text[40:end]} for text, end in texts]
        with open(log, "a") as handle:
            handle.write("".join(json.dumps(line) + "\n" for line in lines))

    def served(run: Path, split: str) -> list[str]:
        return [one.id for one in read_samples(run / "answers" / f"prompts-{split}.arrow", "answers") if one.answer]

    serve(range(500, 540))
    values = unloaded_worlds.values(place)
    values["corpus"] |= {"validation": 0.2, "test": 0.3, "tokens": 300}
    values["answers"] = {"prompts": 0, "new_tokens": 24, "prompt_tokens": 8, "traffic": str(log)}
    recipe = tiny.write_recipe(tmp_path / "recipe.yaml", values)
    assert tiny.call("train", recipe, "--runs", tmp_path, "--until", "eval") == 0
    run = tmp_path / "tiny"
    for split, most in (("validation", 2), ("test", 12)):
        prompts = served(run, split)
        assert len(prompts) > 3
        assert read(run, split, "summary.json")["answers"] == min(most, len(prompts))
        assert not list((run / split).glob("answers-*"))
    serve(range(700, 720))
    assert tiny.call("train", recipe, "--runs", tmp_path, "--until", "eval", "--refresh") == 0
    for split in ("validation", "test"):
        new = served(run, split)
        assert new and not {*new} & {*served(tmp_path / "tiny.1", split)}
    assert read(run, "eval.json")["stored"]["sampled"]["before"]


@pytest.mark.slow
def test_two_processes_make_the_same_stores(place: Path, from_file: Path, tmp_path: Path) -> None:
    """The main process alone makes the held-out ones, while the other waits."""
    shutil.copy(place / "file.yaml", tmp_path / "recipe.yaml")
    result = two_processes(tmp_path, tmp_path / "runs")
    assert result.returncode == 0, result.stderr
    ours, theirs = kept(tmp_path / "runs" / "file"), kept(from_file)
    assert {name for name in theirs if ours[name] != theirs[name]} <= {"draft"}
    assert read(tmp_path, "runs", "file", "training.json")["processes"] == 2
