"""Runs that never load the target: whole runs from a GGUF file and from a server, and what they refuse."""

from __future__ import annotations

import html
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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

from distill.cli.measure import files_of_run, prompts_of_files, prompts_of_run, room_of, template_of
from distill.data.packing import repeated_next
from distill.data.samples import read_answers, read_samples
from distill.engines.torch import hugging_face
from distill.engines.torch.blocks import Packed
from distill.engines.torch.hugging_face import load_config, load_model, load_tokenizer, text_folder
from distill.measuring.evaluation import METRICS, position_metrics, stored_metrics
from distill.recipe import Recipe, Sampler, load_recipe
from distill.run import Run
from distill.teacher.acceptance import acceptance_chances, served_entries
from distill.teacher.distributions import TeacherChunk, compress
from distill.teacher.store import TeacherStore
from distill.teacher.texts import held_out

torch.set_num_threads(1)

CPU = torch.device("cpu")
SERVED = Sampler(temperature=0.3, top_p=0.95)


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


def not_run(place: Path) -> str:
    """Why neither the target's speed nor its file is in these runs."""
    return f"the weights of {place / 'target'} are not on this machine"


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


def test_a_whole_run_without_weights(either: Path, place: Path, capsys: Capture) -> None:
    """Every stage up to the report, except those that time the target; each says why not."""
    run, reason = either, not_run(place)
    stages = {path.stem for path in (run / "stages").glob("*.json")}
    assert stages == {*tiny.STAGES} - {"speedup"}
    assert sorted(path.suffix for path in (run / "gguf").iterdir()) == [".gguf", ".json"], "the draft's file alone"
    log = (run / "log.txt").read_text()
    assert f"speedup: not run: {reason}" in log and f"no file of the target is written: {reason}" in log
    page, card = (run / "report.html").read_text(), (run / "draft" / "README.md").read_text()
    assert f"The stage <code>speedup</code> was not run: {reason}" in page
    assert "The stage `speedup` was not run: the weights of" in card
    for text in (page, card):
        assert "The served sampler is applied to the stored tokens" in text and "sampled answers" in text
        assert "Measured on the target's own answers and the stored distributions of" in html.unescape(text)
    assert "has not run" not in page
    best = read(run, "training.json")["best"]
    assert 0 < best["acceptance"] <= best["most"] <= 1 and best["answers"] == 2
    evaluated = [line for line in opened(run)[1].metrics() if line["stage"] == "acceptance"]
    assert [line["step"] for line in evaluated] == [0, 4, 8], "at every `acceptance.every` steps"
    assert best["acceptance"] == max(line["acceptance"] for line in evaluated)
    report = read(run, "eval.json")
    rounds = report["positions"]["after"]
    assert 0 < rounds[0]["accepted"] < rounds[0]["drafted"] and report["tokens_per_round"]["after"]["mean"] > 1
    assert {one["label"] for one in report["groups"] if one["of"] == "class"} == {"back", "front"}
    assert (
        sum(one["tokens"] for one in report["groups"] if one["of"] == "class")
        == report["domains"]["answers"]["after"]["tokens"]
    )
    rows = tiny.shown(capsys, "eval", run, "-o", "csv")
    assert "answers,share of the sampled answers' tokens that are the draft's argmax," in rows
    assert 'answers,"acceptance probability, rejection sampling",' in rows
    assert f"| {run.name} | finished |" in tiny.shown(capsys, "runs", "--runs", run.parent)


def test_a_served_run_is_checked_on_its_server(either: Path, place: Path) -> None:
    """`serve-check RUN --url` reads tokenizer and context of the model that the run names, as it has no file of it."""
    files = files_of_run(opened(either)[1], None, required=False)
    assert files.target is None and files.model == str(place / "target")
    context = load_config(str(place / "target")).max_position_embeddings
    assert room_of(files, 20) == context - 20
    given, _ = prompts_of_files(files, [place / "test.jsonl"], 2, [16], context - 20)
    assert len(given) == 2 and len(prompts_of_run(files, 3, context - 20)[0]) == 3
    with ExitStack() as stack:
        template = template_of(files, stack)
        assert (template is not None) == bool(load_tokenizer(str(place / "target")).chat_template)


def test_held_out_tokens_add_up(from_file: Path) -> None:
    """Answers, stores and report count the same tokens; nothing held out is learnt from."""
    recipe, run = opened(from_file)
    train = TeacherStore(run).packed.take(slice(None))
    rows = list(zip(train.ids, train.documents, strict=True))
    learnt = {tuple(ids[documents == n].tolist()) for ids, documents in rows for n in range(99)}
    for split, prompts in (("validation", 2), ("test", 12)):
        texts = held_out(recipe, run, split)  # type: ignore[arg-type]
        lines = read_answers(run, split)  # type: ignore[arg-type]
        assert len(lines) == len(texts.answers) == prompts
        tokens = sum(len(line.answer) for line in lines)
        summary = read(from_file, "answers", "manifest.json")["held_out"][split]
        manifest = read(from_file, "teacher", split, "manifest.json")
        assert summary["answer_tokens"] == tokens == int(texts.answered.mask.sum())
        assert sum(one["tokens"] for one in summary["by_class"].values()) == tokens
        assert manifest["scored_positions"] == tokens + int(texts.given.mask.sum())
        assert manifest["answer_positions"] == tokens and manifest["answer_blocks"] == len(texts.answered)
        assert (manifest["kind"], manifest["entries"]) == ("compact", 200), "also where fewer hold teacher.mass"
        assert not {tuple(line.prompt + line.answer) for line in lines} & learnt
    own, given = (read(from_file, "eval.json")["domains"][name]["after"] for name in ("answers", "files"))
    entries = read(from_file, "teacher", "train", "manifest.json")["entries"]
    assert 1 < entries < 150, "of each position those that hold 0.9 of the mass"
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


def served(logits: Tensor, sampler: Sampler) -> Tensor:
    """What a sampler with temperature and top-p draws from [N, V], written out."""
    shares = (logits / sampler.temperature).softmax(-1)
    order = shares.argsort(-1, descending=True)
    sorted_shares = shares.gather(-1, order)
    inside = sorted_shares.cumsum(-1) - sorted_shares < sampler.top_p
    kept = torch.zeros_like(shares).scatter(-1, order, sorted_shares * inside)
    return kept / kept.sum(-1, keepdim=True)


def exact_means(target: Tensor, draft: Tensor, sampler: Sampler) -> dict[str, float]:
    """The measures from logits [N, V] in fp64, written out: KL at temperature 1, acceptance as served."""
    log_p, log_q = target.log_softmax(-1), draft.log_softmax(-1)
    p, q = served(target, sampler), served(draft, sampler)
    best = draft.argmax(-1)
    few = draft.masked_fill(draft < draft.sort(-1).values[:, -10:-9], -torch.inf)
    found = {
        "forward_kl": (log_p.exp() * (log_p - log_q)).sum(-1),
        "acceptance_sampling": torch.minimum(p, q).sum(-1),
        "acceptance_drawn": torch.minimum(p, (few / sampler.temperature).softmax(-1)).sum(-1),
        "acceptance_match": p.gather(-1, best.unsqueeze(-1)).squeeze(-1),
        "acceptance_greedy": (target.argmax(-1) == best).double(),
    }
    return {name: float(values.mean()) for name, values in found.items()}


def test_the_bounds_hold_the_exact_figures(either: Path, place: Path) -> None:
    """Of both drafts, in both domains, at the served sampler. A GGUF file in f32 has llama.cpp's own rounding
    (`noise`). Cold and with top-p, the sampler draws from stored tokens alone: acceptance is then known up to the
    rounding of fp16."""
    noise, run = 2e-3 if either.name == "file" else 1e-5, either
    sampler, widths = Sampler() if either.name == "file" else SERVED, dict[str, float]()
    texts = held_out(*opened(run), "test")
    target, report = loaded(place / "whole"), read(run, "eval.json")
    for domain, blocks in (("answers", texts.answered), ("files", texts.given)):
        expected = reference(target, blocks)
        for side, folder in (("before", "cut"), ("after", "draft")):
            exact = exact_means(expected, reference(loaded(run / folder), blocks), sampler)
            for name, value in exact.items():
                bounds = report["stored"]["bounds"][domain][side][name]
                assert bounds["least"] - noise <= value <= bounds["most"] + noise, (domain, side, name)
                shown = report["domains"][domain][side][name]
                assert shown["low"] - noise <= bounds["least"] and bounds["most"] <= shown["high"] + noise
                assert shown["mean"] == pytest.approx((bounds["least"] + bounds["most"]) / 2)
                widths[name] = max(widths.get(name, 0), bounds["most"] - bounds["least"])
            assert report["stored"]["bounds"][domain][side]["reverse_kl"] == {"least": None, "most": None}
    assert max(widths.values()) < 0.3 and widths["acceptance_greedy"] == 0, "bounds that say something"
    tight = 0.01 if sampler == SERVED else 0.2
    assert all(widths[f"acceptance_{name}"] < tight for name in ("sampling", "match", "drawn")), widths
    assert report["stored"]["exact"] is False


def test_weights_are_chosen_by_the_exact_acceptance(either: Path, place: Path) -> None:
    recipe, run = opened(either)
    own, measure = held_out(recipe, run, "validation").answered, {"file": "sampling", "server": "match"}[either.name]
    line = next(line for line in run.metrics() if line["stage"] == "acceptance" and line["step"] == 0)
    sampler = recipe.sampler
    exact = exact_means(reference(loaded(place / "whole"), own), reference(loaded(either / "cut"), own), sampler)
    assert line["positions"] == int(own.mask.sum())
    assert line["acceptance"] - 2e-3 <= exact[f"acceptance_{measure}"] <= line["most"] + 2e-3
    assert line["most"] - line["acceptance"] < (0.2 if either.name == "file" else 0.01)


def test_the_cut_is_compared_on_the_store(from_server: Path, place: Path) -> None:
    """The KL of the finished cut lies below the exact one (one bucket for the rest) and close to it."""
    recipe, run = opened(from_server)
    blocks = TeacherStore(run, "validation").packed.take(slice(0, recipe.cut.score_blocks))  # its own answers first
    target, draft = reference(loaded(place / "whole"), blocks), reference(loaded(from_server / "cut"), blocks)
    close = read(from_server, "cut", "cut.json")["changes"][-1]["close_after"]
    exact, found, seen = exact_means(target, draft, SERVED), close["kl"], repeated_next(blocks)
    equal = target.argmax(-1) == draft.argmax(-1)
    for kind, here in (("new", ~seen), ("repeated", seen)):
        assert close["agreement"][kind] == pytest.approx(float(equal[here].double().mean()), abs=2 / int(here.sum()))
    assert exact["forward_kl"] - 0.05 < found < exact["forward_kl"] + 1e-3


def test_sampled_answers_estimate_the_match_protocol(from_server: Path, place: Path) -> None:
    """At the served sampler, which is not that of the store: the share agrees with the exact p(argmax q) there, and not
    with that at temperature 1."""
    recipe, run = opened(from_server)
    own = held_out(recipe, run, "test").answered
    target, draft = reference(loaded(place / "whole"), own), reference(loaded(from_server / "draft"), own)
    best = draft.argmax(-1, keepdim=True)
    share = read(from_server, "eval.json")["stored"]["sampled"]["after"]
    assert share["mean"] == pytest.approx(float((own.labels() == best.squeeze(-1)).double().mean()))
    chances = served(target, SERVED).gather(-1, best).squeeze(-1)
    error = float((chances * (1 - chances)).sum()) ** 0.5 / len(chances)
    assert abs(share["mean"] - float(chances.mean())) < 4 * error
    hot = target.softmax(-1).gather(-1, best).squeeze(-1)
    assert abs(share["mean"] - float(hot.mean())) > 4 * error


VOCABULARY = 90


def made_chunk(logits: Tensor, k: int) -> TeacherChunk:
    """The entries as a store holds them."""
    found = compress(logits.clone(), k, VOCABULARY)
    assert found.ids is not None
    return TeacherChunk(found.ids.long(), found.log_probabilities.half().float(), found.log_tail)


SAMPLERS = (Sampler(), SERVED, Sampler(temperature=0.8, top_k=8), Sampler(temperature=1.2, min_p=0.1))


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("trimmed", [False, True])
@pytest.mark.parametrize("k", [1, 16, 64, VOCABULARY - 1])
def test_every_position_lies_within_its_bounds(k: int, trimmed: bool, sampler: Sampler) -> None:
    """Random pairs, near and far, sharp and flat: the exact figures of position_metrics."""
    generator = torch.Generator().manual_seed(k)
    target = torch.randn(600, VOCABULARY, generator=generator) * torch.rand(600, 1, generator=generator) * 8
    draft = target + torch.randn(600, VOCABULARY, generator=generator) * torch.rand(600, 1, generator=generator) * 3
    if trimmed:
        draft[:, 1::3] = -torch.inf
    exact = position_metrics(target, draft, sampler, VOCABULARY).double()
    chunk = made_chunk(target, k)
    least, most = (found.double() for found in stored_metrics(chunk, draft, sampler))
    inside = served_entries(chunk, sampler, VOCABULARY).exact
    assert k == 1 or sampler == Sampler() or float(inside.double().mean()) > 0.3, "drawn from stored tokens alone"
    for column, name in enumerate(METRICS):
        low, high, value = least[:, column], most[:, column], exact[:, column]
        if name == "reverse_kl" or (trimmed and name == "forward_kl"):
            assert bool(low.isnan().all() and high.isnan().all())
            continue
        assert bool((low - 2e-6 <= value).all() and (value <= high + 2e-6).all()), name
        if name == "acceptance_sampling":
            other = value.roll(1)
            assert not bool(((low <= other) & (other <= high)).all()), "they do not hold just any value"
            widths = (high - low)[inside if sampler != Sampler() or k < VOCABULARY - 1 else slice(None)]
            assert not len(widths) or float(widths.max()) < 2e-2, "tight where the sampler draws from stored tokens"
    for protocol in ("sampling", "match", "greedy"):
        low, high = acceptance_chances(chunk, draft, sampler, protocol)  # type: ignore[arg-type]
        value = exact[:, METRICS.index(f"acceptance_{protocol}")]
        assert bool((low.double() - 2e-6 <= value).all() and (value <= high.double() + 2e-6).all()), protocol


# ── what needs the weights is refused, or not done ──

Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda v: v["answers"].pop("writer"), "target has no weights"),
        (lambda v: v["teacher"].pop("gguf"), "target has no weights"),
        (lambda v: v["cut"].pop("donor"), "cut.donor is the target itself: the weights of"),
        (
            lambda v: v["teacher"].update(kind="exact", mass=None),
            "gguf gives the entries of a compact store, but kind is exact",
        ),
    ],
)
def test_recipes_that_need_the_weights_are_refused(
    change: Change, expected: str, place: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Before any work, where the target's folder has none."""
    values = unloaded_worlds.values(place)
    change(values)
    recipe = tiny.write_recipe(tmp_path / "recipe.yaml", values)
    assert expected in tiny.refused(capsys, "check", recipe)


def test_no_command_loads_the_target(from_file: Path, place: Path, capsys: Capture) -> None:
    recipe, runs, no_part = place / "file.yaml", from_file.parent, "stage `speedup` is not part of this run"
    for arguments, expected in (
        (("speedup", from_file), f"{no_part}: {not_run(place)}"),
        (("train", recipe, "--runs", runs, "--until", "speedup"), no_part),
        (("train", recipe, "--runs", runs, "--redo", "speedup"), no_part),
        (("generate", "def f(", from_file), "target has no weights"),
    ):
        said = tiny.refused(capsys, *arguments)
        assert expected in said, (arguments, said)
    said = tiny.told(capsys, "train", recipe, "--runs", runs, "--dry-run")
    assert f"speedup: not run: {not_run(place)}" in said and "report: up to date" in said
    assert tiny.call("export-gguf", from_file, "--outtype", "f16", "--to", place / "extra") == 0
    assert [path.name for path in (place / "extra").glob("*.gguf")] == ["draft-f16.gguf"]
    for server in ("llama.cpp", "sglang", "vllm"):
        assert tiny.call("export-lookup", from_file, "--for", server, "--to", place / "extra" / server) == 0
        assert (place / "extra" / server).stat().st_size > 1000


def test_cut_train_and_eval_read_stores_alone(world: Path, copied: Path, monkeypatch: Patch) -> None:
    """Of a run whose target's weights are there: the weights of a target that is not its own donor are never opened."""
    opened: list[str] = []
    load = hugging_face.load_weights

    def watched(reference: str, *arguments: Any, **named: Any) -> Any:
        opened.append(reference)
        return load(reference, *arguments, **named)

    shutil.copytree(world / "target", copied.parent / "donor")
    monkeypatch.setattr(hugging_face, "load_weights", watched)
    monkeypatch.setattr("distill.training.setup.load_weights", watched)
    donor = (f"cut.donor={copied.parent / 'donor'}", "--redo", "cut", "--until", "eval")
    assert tiny.call("train", world / "recipe.yaml", "--runs", copied.parent, *donor) == 0
    assert {Path(one).name for one in opened} == {"donor", "cut", "draft"}


def test_check_counts_no_weights_of_the_target(place: Path, capsys: Capture) -> None:
    recipe = tiny.write_recipe(place / "checked.yaml", unloaded_worlds.values(place))
    said = tiny.shown(capsys, "check", recipe)
    assert f"target: {place / 'target'} runs elsewhere for answers and distributions" in said
    assert f"not run: speedup, and no GGUF file of the target is written: {not_run(place)}" in said
    assert f"tensors of {place / 'donor'}" in said and f"tensors of {place / 'target'}" not in said
    assert "the recipe's sampler) on stored answers to 2 validation prompts are taken" in said


def test_only_small_files_of_a_hub_target_are_fetched(monkeypatch: Patch, tmp_path: Path) -> None:
    def download(name: str, allow_patterns: Any) -> str:
        assert (name, allow_patterns) == ("some/target", hugging_face.SMALL_FILES)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert text_folder("some/target") == tmp_path
    assert not any("safetensors" in pattern for pattern in hugging_face.SMALL_FILES)


# ── resuming ──


def kept(run: Path) -> dict[str, dict[str, str]]:
    return {
        name: tiny.contents(run / name, "README.md")
        for name in ("answers", "teacher", "cut", "draft")
        if (run / name).exists()
    }


@pytest.mark.slow
def test_kills_leave_the_same_bytes(place: Path, from_file: Path, tmp_path: Path) -> None:
    """Copies of a finished run, as they stood after stage `corpus`, die at moments spread over all that is written from
    the first answer to the draft; the same command goes on."""

    def begun(name: str) -> list[str]:
        shutil.copytree(from_file, tmp_path / name, ignore=_after_corpus)
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
    for stage in ("answers", "teacher", "train"):
        assert any(f"{stage}: resumes" in log for log in logs)


def test_a_journal_that_a_kill_left_goes(place: Path, from_file: Path, tmp_path: Path) -> None:
    """Its file is whole: only the removal of the journal was cut off."""
    run = tmp_path / "file"
    shutil.copytree(from_file, run)
    for split in ("train", "test"):
        (run / "answers" / split / ".00000.journal").write_text('{"id": "x"}\n')
    (run / "stages" / "answers.begun.json").write_text(json.dumps(read(run, "stages", "answers.json")["inputs"]))
    (run / "stages" / "answers.json").unlink()
    assert tiny.call("train", place / "file.yaml", "--runs", tmp_path, "--until", "teacher") == 0
    assert kept(run) == kept(from_file) and not list(run.rglob(".*.journal"))


def _after_corpus(folder: str, names: list[str]) -> set[str]:
    """What a copy of a run leaves out, so that it stands after stage `corpus`."""
    late = {"answers", "teacher", "cut", "checkpoints", "draft", "training.json", "metrics.jsonl"}
    if Path(folder).name == "stages":
        return {name for name in names if Path(name).stem != "corpus"}
    return late & set(names) if (Path(folder) / "config.yaml").exists() else set()


def test_other_prompts_are_asked_without_new_training(place: Path, from_file: Path, tmp_path: Path) -> None:
    """More test prompts: what is held out for the test is asked and stored again, nothing else that is expensive."""
    run = tmp_path / "file"
    shutil.copytree(from_file, run)
    before = kept(run)
    assert tiny.call("train", place / "file.yaml", "--runs", tmp_path, "eval.prompts=16", "--until", "eval") == 0
    after = kept(run)
    assert read(run, "answers", "manifest.json")["held_out"]["test"]["answers"] == 16
    changed = {
        f"{name}/{file}" for name in before for file, found in before[name].items() if after[name][file] != found
    }
    assert changed and {one for one in changed if not one.startswith(("answers/test/", "teacher/test/"))} <= {
        "answers/manifest.json"
    }


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
        assert read(run, "answers", "manifest.json")["held_out"][split]["answers"] == min(most, len(prompts))
        assert not list((run / "answers" / split).glob("*.arrow"))
    serve(range(700, 720))
    assert tiny.call("train", recipe, "--runs", tmp_path, "--until", "eval", "--refresh") == 0
    for split in ("validation", "test"):
        new = served(run, split)
        assert new and not {*new} & {*served(tmp_path / "tiny.1", split)}
    assert read(run, "eval.json")["stored"]["sampled"]["before"]


@pytest.mark.slow
def test_two_processes_make_the_same_stores(place: Path, from_file: Path, tmp_path: Path) -> None:
    """Each process makes its share of the answers and of the shards, held-out ones included."""
    shutil.copy(place / "file.yaml", tmp_path / "recipe.yaml")
    result = two_processes(tmp_path, tmp_path / "runs")
    assert result.returncode == 0, result.stderr
    ours, theirs = kept(tmp_path / "runs" / "file"), kept(from_file)
    assert {name for name in theirs if ours[name] != theirs[name]} <= {"draft"}
    assert read(tmp_path, "runs", "file", "training.json")["processes"] == 2
