"""The target's distributions from a GGUF file and from servers: its own, in the same store, or refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_teacher import CPU, ROWS, TOKENS, begin, finish, text
from tiny import Capture, Patch
from torch import Tensor
from toys import save_toy, toy, toy_tokenizer
from vllm_server import VllmServer

from distill import http
from distill.data.packing import pack
from distill.data.samples import SPLITS
from distill.divergences import acceptance_bounds, acceptance_sampling, forward_kl, forward_kl_bounds
from distill.engines.llama_cpp.model import GgufModel
from distill.engines.torch.blocks import Packed
from distill.engines.torch.hugging_face import load_model
from distill.errors import DataError, DistillError, EndpointError, PairError
from distill.files import read_json
from distill.gguf.writer import export_gguf
from distill.recipe import GgufOptions, Recipe
from distill.run import Run
from distill.teacher.readers import MAX_PADDING, GgufReader, listed_documents, log_tails
from distill.teacher.store import TeacherStore, teacher

torch.set_num_threads(1)

SIZE = TOKENS  # of the models' rows, the others pad


def full_tokenizer() -> Any:
    """The toy tokenizer with as many tokens as the texts of these tests use."""
    tokenizer = toy_tokenizer(TOKENS)
    tokenizer.add_tokens([f"<extra {number}>" for number in range(TOKENS - len(tokenizer))])
    return tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 300 tokens in 307 rows, wide enough that llama.cpp quantises it, with GGUF files."""
    folder = tmp_path_factory.mktemp("target")
    model = toy("qwen2", vocabulary=ROWS, hidden_size=64, intermediate_size=96)
    save_toy(model, full_tokenizer(), folder)
    for outtype in ("f32", "q8_0"):
        export_gguf(folder, folder / f"{outtype}.gguf", outtype)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return load_model(str(target), "float32", CPU)


@pytest.fixture(autouse=True)
def quick(monkeypatch: Patch) -> None:
    """Repetitions follow at once."""
    monkeypatch.setattr(http, "FIRST_DELAY", 0.001)


def stored(recipe: Recipe, run: Run) -> tuple[TeacherStore, Tensor, Tensor, Tensor]:
    """A finished store, its ids [N, K], log p and log tail [N] at every scored position."""
    finish(run, teacher(recipe, run))
    store = TeacherStore(run)
    chunk = store.read(torch.arange(store.blocks)).distributions(CPU).chunk(slice(None))
    assert chunk.ids is not None
    return store, chunk.ids, chunk.log_probabilities, chunk.log_tail


def token_by_token(path: Path, blocks: Packed) -> Tensor:
    """log p [N, V] in fp64 of a GGUF file at the scored positions, one token at a time, each with another beside it."""
    rows = []
    with GgufModel(path, context=65, threads=1) as model:
        for document in listed_documents(blocks):
            logits = []
            for place, token in enumerate(document.ids[:-1]):
                model.rollback([place])
                logits.append(model.extend([token, token]).full()[0])
            rows += [logits[position][:SIZE].double().log_softmax(-1) for position in document.scored]
    return torch.stack(rows)


def require_bounds(expected: Tensor, ids: Tensor, logs: Tensor, tail: Tensor) -> None:
    """Against a draft: the store's bounds of KL and α hold the exact values of the distributions [N, V]."""
    draft = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 + expected
    stored = (ids, logs.double(), tail.double(), draft)
    noise = 5e-3  # of log p in fp16
    for (low, high), exact in (
        (acceptance_bounds(*stored), acceptance_sampling(expected.exp(), draft.softmax(-1))),
        (forward_kl_bounds(*stored), forward_kl(expected, draft.log_softmax(-1))),
    ):
        assert bool((low <= exact + noise).all()) and bool((exact <= high + noise).all())
        other = exact.roll(1)
        assert not bool(((low <= other) & (other <= high)).all()), "they do not hold just any value"


@pytest.mark.parametrize("outtype", ["f32", "q8_0"])
@pytest.mark.parametrize("entries", [{"top_k": 16}, {"top_k": 200, "mass": 0.9}])
def test_a_gguf_target_is_stored_as_it_reads_one_token_at_a_time(
    outtype: str, entries: dict[str, Any], target: Path, model: Any, tmp_path: Path
) -> None:
    path = target / f"{outtype}.gguf"
    recipe, run = begin(tmp_path, target, gguf=str(path), **entries)
    store, ids, logs, tail = stored(recipe, run)
    expected = token_by_token(path, store.packed.take(slice(None)))
    assert len(ids) == len(expected) == int(store.packed.take(slice(None)).mask.sum()) and store.vocabulary == SIZE
    if "mass" in entries:
        falling = expected.exp().sort(-1, descending=True).values.cumsum(-1)
        assert torch.equal((ids < SIZE).sum(-1), ((falling < 0.9).sum(-1) + 1).clamp(max=200))
        assert 1 < store.manifest["entries"] < 200
    used = ids < SIZE
    tokens = torch.where(used, ids, ids[:, :1])
    exact = expected.gather(-1, tokens)
    torch.testing.assert_close(logs[used].double(), exact[used], rtol=6e-4, atol=1e-4)  # fp16's rounding
    outside = expected.scatter(-1, tokens, -torch.inf)
    assert bool((outside.amax(-1) <= exact.amin(-1) + 1e-6).all())
    torch.testing.assert_close(tail.double(), outside.logsumexp(-1), rtol=1e-4, atol=1e-4)
    require_bounds(expected, ids, logs, tail)
    whole = over_all_rows(model, store.packed.take(slice(None)))[:, :SIZE].log_softmax(-1)
    difference = float((whole - expected).abs().max())
    assert difference < 0.05 if outtype == "f32" else 0.01 < difference < 1.5, "the file's own quantisation"
    assert store.manifest["origin"]["kind"] == "gguf" and store.manifest["origin"]["path"] == str(path)


def test_pieces_of_a_long_document_give_the_same(target: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """Documents fall into pieces of ROWS tokens; with pieces of 5 the entries are the same, bit for bit."""
    blocks = pack([(text(70, 3), 4), (text(11, 4), 1), (text(1, 5), 1), (text(40, 6), 39)], 80, split_long=True)
    found = []
    for size in (512, 5):
        monkeypatch.setattr("distill.teacher.readers.ROWS", size)
        reader = GgufReader(str(target / "q8_0.gguf"), str(target), 80, SIZE, GgufOptions(threads=1))
        found.append(reader(blocks, 12))
        reader.close()
    assert all(map(torch.equal, *found)) and len(found[0][0]) == int(blocks.mask.sum())


def test_another_gguf_file_is_refused(target: Path, tmp_path: Path) -> None:
    for name, tokenizer, context, words in (
        ("other", toy_tokenizer(290), 160, r"other\.gguf has other tokens than .* token \d+ is [\s\S]*differences"),
        ("short", full_tokenizer(), 16, r"corpus\.block is 24, the context of .*short\.gguf 16"),
        ("missing", None, 0, r"missing\.gguf"),
    ):
        path = tmp_path / f"{name}.gguf"
        if tokenizer is not None:
            model = toy("qwen2", vocabulary=ROWS, max_position_embeddings=context)
            export_gguf(save_toy(model, tokenizer, tmp_path / name), path, "f16")
        recipe, run = begin(tmp_path / f"run-{name}", target, gguf=str(path))
        with pytest.raises((PairError, DataError), match=words):
            teacher(recipe, run)


# ── servers ──


def served(folder: Path, target: Path, *servers: VllmServer, **more: Any) -> tuple[Recipe, Run]:
    """A run whose teacher is the servers."""
    entries = {name: more.pop(name) for name in ("top_k", "mass") if name in more}
    server = {"urls": [one.url for one in servers], "model": "target", "connections": 3, "retries": 5} | more
    return begin(folder, target, server=server, **({"top_k": 10} | entries))


@pytest.fixture
def server(model: Any) -> Iterator[VllmServer]:
    with VllmServer(model, max_logprobs=200 + MAX_PADDING).running() as one:
        yield one


def over_all_rows(model: Any, blocks: Packed) -> Tensor:
    """log p [N, rows] in fp64 at the scored positions, padding rows included."""
    rows = []
    with torch.no_grad():
        for document in listed_documents(blocks):
            logits = model(input_ids=torch.tensor([document.ids])).logits[0, document.scored]
            rows.append(logits.double().log_softmax(-1))
    return torch.cat(rows)


@pytest.mark.parametrize("entries", [{"top_k": 16}, {"top_k": 200, "mass": 0.9}])
def test_a_servers_log_probabilities_are_stored(
    entries: dict[str, Any], target: Path, model: Any, server: VllmServer, tmp_path: Path
) -> None:
    """The mass of padding rows, which the server counts, is in the tail: those rows are no tokens."""
    recipe, run = served(tmp_path, target, server, **entries)
    store, ids, logs, tail = stored(recipe, run)
    everything = over_all_rows(model, store.packed.take(slice(None)))
    expected = everything[:, :SIZE]
    assert len(ids) == len(expected) == int(store.packed.take(slice(None)).mask.sum()) and int(ids.max()) <= SIZE
    used = ids < SIZE  # the others are places that a position does not use
    tokens = torch.where(used, ids, ids[:, :1])
    torch.testing.assert_close(logs[used].double(), expected.gather(-1, tokens)[used], rtol=6e-4, atol=1e-4)
    rest = everything.scatter(-1, tokens, -torch.inf).logsumexp(-1)
    torch.testing.assert_close(tail.double().exp(), rest.exp(), rtol=1e-3, atol=2e-6)
    padded = torch.cat([expected, everything[:, SIZE:].logsumexp(-1, keepdim=True)], -1)
    require_bounds(padded, ids.masked_fill(~used, padded.shape[-1]), logs, tail)
    assert store.manifest["origin"] == {"kind": "server", "model": "target"}
    assert all(isinstance(body["prompt"], list) and body["temperature"] == 0 for body in server.requests)
    assert 1 <= server.most_active <= 3
    blocks = [TeacherStore(run, split).packed.take(slice(None)) for split in SPLITS]
    documents = sum(len(listed_documents(own)) for own in blocks)
    assert len(server.requests) == documents + 1, "each document once, and the first check"


def test_the_tail_of_rounded_log_probabilities() -> None:
    """fp32 log p of peaked and flat distributions: the tail is right to the sum's rounding."""
    logits = torch.randn(400, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    logits *= torch.linspace(0.1, 12, 400, dtype=torch.float64).unsqueeze(-1)
    whole = logits.log_softmax(-1)
    values, ids = whole.topk(20)
    expected = whole.scatter(-1, ids, -torch.inf).logsumexp(-1)
    found = log_tails(values.float())
    assert float((found.exp() - expected.exp()).abs().max()) < 1e-6
    clear = expected > -12
    assert 100 < int(clear.sum()) < 400 and float((found - expected)[clear].abs().max()) < 0.05
    assert bool(found.isfinite().all()) and float(found[~clear].exp().max()) < 1e-5


REFUSED = {
    "another model": "answers for the model another-model",
    "other ids": r"its ids are not those of the target's tokenizer",
    "a bos": r"its ids are not those of the target's tokenizer",
    "no logprobs": r"no log-probabilities of prompts[\s\S]*llama-server[\s\S]*answers alone",
    "a hole": r"no log-probabilities at prompt token 1[\s\S]*--no-enable-prefix-caching",
    "few": r"of which \d are of tokens, and 10 are needed[\s\S]*--max-logprobs 17",
    "raw logits": "are not log-probabilities",
    "text alone": r"status 422\): Input should be a valid string[\s\S]*takes? no token ids as a prompt: use vLLM",
    "500": r"6 times in a row, the last time: status 500[\s\S]*same command",
    "twice": "the last time: .*choices",
    "wrong JSON": "the last time: a reply that is not a JSON object",
    "cut": "the last time: broken connection",
    "redirect": r"status 307[\s\S]*of a redirect, where it leads to",
}


@pytest.mark.parametrize(("first", "fault"), [(3, fault) for fault in REFUSED] + [(0, "no logprobs"), (0, "500")])
def test_other_replies_are_refused_and_nothing_is_lost(
    first: int, fault: str, target: Path, model: Any, tmp_path: Path
) -> None:
    """At the first request or later; the shards that are whole stay, and the same command finishes the store."""
    with VllmServer(model, max_logprobs=64, faults=[None] * first + [fault] * 99).running() as one:
        recipe, run = served(tmp_path, target, one, connections=1)
        with pytest.raises(DistillError, match=REFUSED[fault]):
            teacher(recipe, run)
        assert not run.path("teacher", "train", "manifest.json").exists()
        one.faults = None
        teacher(recipe, run)
    assert read_json(run.path("teacher", "train", "manifest.json"))["entries"] == 10


def test_a_server_of_another_model_is_refused(target: Path, model: Any, tmp_path: Path) -> None:
    for settings, listed, words in (
        ({"name": "other-70b"}, True, r"does not serve target, but other-70b"),
        ({"name": "other-70b"}, False, r"status 404\): The model `target` does not exist"),  # a gateway
        ({"max_logprobs": 15}, True, r"logprobs of 17, which is greater[\s\S]*larger --max-logprobs"),
        ({"context": 20}, True, r"context of 20 tokens[\s\S]*--max-model-len 25"),
    ):
        with VllmServer(model, **{"max_logprobs": 64} | settings).running() as one:
            one.path_of_models = listed
            recipe, run = served(tmp_path / f"{settings}{listed}", target, one, retries=1)
            with pytest.raises(EndpointError, match=words):
                teacher(recipe, run)
    with pytest.raises(EndpointError, match=r"cannot be reached: no connection"):
        teacher(recipe, run)


@pytest.mark.parametrize("command", ["check", "train"])
def test_the_teacher_is_asked_before_the_first_stage(
    command: str, world: Path, tmp_path: Path, capsys: Capture
) -> None:
    values = tiny.recipe_values(world, elsewhere=True)
    model = load_model(str(world / "target"), "float32", CPU)
    with VllmServer(model, max_logprobs=64, faults="no logprobs").running() as one:
        values["teacher"]["server"] = {"urls": [one.url], "model": "target"}
        recipe = tiny.write_recipe(tmp_path / "recipe.yaml", values)
        more = ["--runs", tmp_path / "runs", "--until", "teacher"] if command == "train" else []
        assert "no log-probabilities of prompts" in tiny.refused(capsys, command, recipe, *more)
        assert not (tmp_path / "runs").exists()
        if command == "check":
            told = tiny.shown(capsys, "check", recipe, "--offline")
            assert "not asked; its distributions hold at temperature 1" in told
        one.faults = None
        assert tiny.call(command, recipe, *more) == 0
    assert "temperature 1" in "".join(capsys.readouterr())
    if command == "train":  # the store is whole: the server is not needed any more
        assert tiny.call("train", recipe, *more) == 0
