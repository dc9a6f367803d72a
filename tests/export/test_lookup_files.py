"""Files that servers draft from without a model: each as its program reads it, and llama.cpp's in a real server."""

from __future__ import annotations

import json
import shlex
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import served_pairs
import tiny
import wheel_server

from distill.data.samples import Sample, read_answers
from distill.decoding.lookup_files import FORMS
from distill.engines import server_commands
from distill.engines.server_commands import drafting_from_texts
from distill.errors import DataError
from distill.recipe import load_recipe
from distill.run import Run
from distill.serving.check import LlamaClient
from distill.serving.server import Http, LlamaServer, started

Capture = pytest.CaptureFixture[str]


def learnt(run: Path) -> list[Sample]:
    found = [one for one in read_answers(Run(run, load_recipe(run / "config.yaml")), "train") if not one.dropped]
    assert len(found) > 4
    return found


def texts_of(answers: list[Sample]) -> list[list[int]]:
    return [one.prompt[-4:] + one.answer for one in answers]


def read_cache(data: bytes) -> Iterator[tuple[tuple[int, ...], dict[int, int]]]:
    """As common_ngram_cache_load reads: an n-gram of four places, how many tokens follow it, each with its count."""
    while data:
        *ngram, size = struct.unpack_from("<5i", data)
        pairs = struct.unpack_from(f"<{2 * size}i", data, 20)
        data = data[20 + 8 * size :]
        assert size > 0
        yield tuple(ngram), dict(zip(pairs[::2], pairs[1::2], strict=True))


def test_each_server_s_file_holds_the_run_s_own_answers(finished: Path, tmp_path: Path, plain: Any) -> None:
    """Counted here from the answers' files; and the same command writes the same bytes."""
    answers, written = learnt(finished), {}
    texts = texts_of(answers)
    for server in FORMS:
        for place in (tmp_path / server, tmp_path / "again" / server):
            place.parent.mkdir(exist_ok=True)
            arguments = (finished.name, "--runs", finished.parent, "--for", server, "--to", place)
            assert tiny.call("export-lookup", *arguments) == 0
        written[server] = place.read_bytes()
        assert (tmp_path / server).read_bytes() == written[server]
    found = list(read_cache(written["llama.cpp"]))
    counted = Counter((text[i], text[i + 1], text[i + 2]) for text in texts for i in range(len(text) - 2))
    assert all(ngram[2:] == (-1, -1) for ngram, _ in found) and len({ngram for ngram, _ in found}) == len(found)
    assert {(*ngram[:2], token): n for ngram, after in found for token, n in after.items()} == counted
    ids = [token for text in texts for token in text]
    assert struct.unpack(f"<{len(ids)}i", written["ik_llama"]) == tuple(ids)
    # SGLang encodes each JSON string without special tokens of its own.
    lines = [json.loads(line) for line in written["sglang"].splitlines()]
    assert lines == [plain.decode(text, skip_special_tokens=False) for text in texts]
    requests = [json.loads(line) for line in written["vllm"].splitlines()]
    assert [(one["prompt"], one["max_tokens"]) for one in requests] == [(a.prompt, len(a.answer)) for a in answers]
    assert {(one["temperature"], one["top_p"]) for one in requests} == {(1.0, 1.0)}


def test_what_cannot_be_exported_is_refused(copied: Path, tmp_path: Path, capsys: Capture) -> None:
    runs = ("--runs", copied.parent)
    assert tiny.call("export-lookup", copied.name, *runs) == 0
    said = capsys.readouterr().out
    place = copied / "lookup" / "llama.cpp-static.bin"
    assert said.startswith(f"{place}  ")
    assert f"-m TARGET.gguf --spec-type ngram-cache --lookup-cache-static {place}" in said
    assert "--overwrite replaces it" in tiny.refused(capsys, "export-lookup", copied.name, *runs)
    assert tiny.call("export-lookup", copied.name, *runs, "--overwrite") == 0
    (file,) = list((copied / "answers" / "train").glob("00000*"))
    kept = file.read_bytes()
    file.write_bytes(kept.replace(b"1", b"2", 1))
    assert "is damaged" in tiny.refused(capsys, "export-lookup", copied.name, *runs, "--overwrite")
    (copied / "stages" / "answers.json").unlink()
    said = tiny.refused(capsys, "export-lookup", copied.name, *runs, "--for", "vllm")
    assert "has no finished answers" in said and "--until answers" in said and not (copied / "lookup" / "vllm").exists()


def test_what_a_server_takes_is_in_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(server: str, tokens: int, file: str = "f", texts: int = 2) -> str:
        return drafting_from_texts(server, "m", file, texts, tokens)

    assert "suffix_max_depth=64," in command("ik_llama", 4_000_000)
    assert "suffix_max_depth=53," in command("ik_llama", 5_000_000), "2^28 tokens × depth"
    assert shlex.split(command("ik_llama", 9, "it's"))[-1].endswith(r"suffix_corpus='it\'s'")
    assert "max-tokens" not in command("sglang", 9_999_998) and "max-tokens 10000001" in command("sglang", 9_999_999)
    assert "max_cached_requests" not in command("vllm", 9) and "10001" in command("vllm", 9, texts=10_001)
    monkeypatch.setattr("distill.decoding.lookup_files.IK_INSERTED", 60)
    monkeypatch.setattr(server_commands, "IK_INSERTED", 60)
    with pytest.raises(DataError, match=r"11 tokens of answers: ik_llama\.cpp reads at most 10"):
        FORMS["ik_llama"][1](None, [Sample("a", [1, 2, 3, 4], [5] * 7)])  # type: ignore[arg-type]


class Printed(LlamaServer):
    """A server started by the arguments of a command, which are its `further`."""

    served = property(lambda self: [*self.further])  # type: ignore[assignment]


@pytest.mark.skipif(not wheel_server.INSTALLED, reason="needs xllamacpp")
def test_a_llama_server_drafts_from_the_file(tmp_path: Path) -> None:
    """Its own greedy texts, exported, are drafted and accepted; without the file, only what a text repeats is."""
    from distill.gguf.writer import export_gguf

    target, file = tmp_path / "target.gguf", tmp_path / "static.bin"
    export_gguf(served_pairs.TARGET, target, "f16")
    prompts = served_pairs.prompts(target, 160, shortest=2000)
    command = shlex.split(drafting_from_texts("llama.cpp", str(target), str(file), 8, 9))[1:]
    plain = Printed(wheel_server.program(tmp_path), target, threads=1, further=tuple(command[:2]))

    def served(server: LlamaServer) -> tuple[list[list[int]], int]:
        with started(server, 60) as running, closing(Http(running.url, 60)) as http:
            texts = [LlamaClient(http).complete(prompt.prompt, 32) for prompt in prompts]
        return [text.tokens for text in texts], sum(text.counts.accepted for text in texts)

    texts, _ = served(plain)
    answers = [Sample(one.id, one.prompt, new) for one, new in zip(prompts, texts, strict=True)]
    file.write_bytes(FORMS["llama.cpp"][1](None, [*answers, *answers])[0])  # type: ignore[arg-type]
    without, own = served(replace(plain, further=tuple(command[:4])))
    drafted, accepted = served(replace(plain, further=tuple(command)))
    assert without == texts and drafted == texts, "greedy texts are the target's, whatever drafts"
    assert accepted > own + 40
