"""GGUF files of runs: what the head says of their origin, what is recorded of the check, and the exit status."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from test_gguf_reference import script
from tiny import Capture, Patch, needs_llama

from distill.errors import RunError
from distill.export import ExportReport, origins
from distill.files import read_result
from distill.gguf import writer as writing
from distill.gguf.fields import Origin
from distill.gguf.writer import export_files, export_gguf
from distill.recipe import load_recipe
from distill.run import Run


def fields_of(path: Path) -> Mapping[str, Any]:
    return {key: value[-1] for key, value in script.describe(path)["fields"].items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "target"
    tiny.build_model(folder)
    return folder


def test_origin_in_the_head(model: Path, tmp_path: Path) -> None:
    origin = Origin("demo draft", "demo", "Org/Base-1B", "mit", ("Org/text",))
    export_files(model, {tmp_path / "m.gguf": "f16"}, origin)
    found = fields_of(tmp_path / "m.gguf")
    assert found["general.name"] == "demo draft" and found["general.license"] == "mit"
    assert found["general.base_model.0.repo_url"] == "https://huggingface.co/Org/Base-1B"
    assert found["general.dataset.0.repo_url"] == "https://huggingface.co/Org/text"
    assert found["general.size_label"].endswith("K") and found["distill.recipe"] == "demo"
    export_gguf(model, tmp_path / "plain.gguf", "f16")
    ours = {key for key in fields_of(tmp_path / "plain.gguf") if key.startswith("distill.")}
    assert ours == {"distill.version"}
    # What a model card says comes first.
    shutil.copytree(model, tmp_path / "m")
    (tmp_path / "m" / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: Own/Base\n---\n")
    export_files(tmp_path / "m", {tmp_path / "m.gguf": "f16"}, Origin(base_model="Org/Other", licence="mit"))
    found = fields_of(tmp_path / "m.gguf")
    assert found["general.license"] == "apache-2.0" and found["general.base_model.0.name"] == "Base"
    assert found["general.base_model.count"] == 1


@needs_llama
@pytest.mark.parametrize("kinds", [("f32", "q8_0", "q4_k_m", "q5_k_m"), ("f16", "q4_k_m", "q5_k_m")])
def test_several_types_are_written_as_each_alone(
    kinds: tuple[str, ...], model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Each tensor is read once, and the quantiser reads one exact file: of this fp32 source, an f32 output itself."""
    for kind in kinds:
        export_gguf(model, tmp_path / "alone" / f"{kind}.gguf", kind)
    reads, sources = list[str](), list[str]()
    read_tensors, quantise_file = writing.read_tensors, writing.quantise_file

    def counted(*given: Any) -> Any:
        def watch(one: Any) -> Any:
            return lambda first, count: (reads.append(f"{one.name} {first}"), one.read(first, count))[1]

        return [replace(one, read=watch(one)) for one in read_tensors(*given)]

    def watched(exact: Path, *more: Any) -> int:
        sources.append(exact.name)
        return quantise_file(exact, *more)

    monkeypatch.setattr(writing, "read_tensors", counted)
    monkeypatch.setattr(writing, "quantise_file", watched)
    reports = export_files(model, {tmp_path / "all" / f"{kind}.gguf": kind for kind in kinds})
    assert [report.outtype for report in reports] == list(kinds)
    assert tiny.contents(tmp_path / "all") == tiny.contents(tmp_path / "alone")
    assert len(reads) == len(set(reads)) > 20
    assert len(sources) == 2 and sources[0] == sources[1]
    assert (sources[0] == "f32.gguf") == (kinds[0] == "f32")


@needs_llama
@pytest.mark.parametrize(("free", "message"), [(0, "the disk is full"), (2**30, "cannot write")])
def test_a_disk_that_fails_under_the_quantiser(
    free: int, message: str, model: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """llama.cpp says "iostream error" for every fault of the disk; here files end at 50 kB."""
    real, limits = writing._quantise, resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*given: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
        try:
            real(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    monkeypatch.setattr(writing, "_quantise", limited)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**30, used=0, free=free))
    with pytest.raises(RunError, match=message):
        export_gguf(model, tmp_path / "m.gguf", "q4_k_m")
    assert list(tmp_path.iterdir()) == []


def test_origins_of_a_run(tmp_path: Path, world: Path) -> None:
    recipe = load_recipe(world / "recipe.yaml")
    shutil.copytree(world / "target", tmp_path / "donor")
    (tmp_path / "donor" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    recipe = recipe.model_copy(update={"cut": recipe.cut.model_copy(update={"donor": str(tmp_path / "donor")})})
    found = origins(recipe, Run(tmp_path, recipe, silent=True))
    assert found["draft"] == Origin("tiny draft", "tiny", None, "apache-2.0")
    assert found["target"] == Origin("tiny target")
    (tmp_path / "donor" / "README.md").write_text("---\nlicense: [\n---\n")  # the run must not end here
    assert origins(recipe, Run(tmp_path, recipe, silent=True))["draft"].licence is None


@needs_llama
def test_the_command_writes_beside_the_stage(copied: Path, capsys: Capture) -> None:
    stage = tiny.contents(copied / "gguf")
    again = ("export-gguf", "tiny", "--runs", copied.parent, "--outtype", "f16")
    assert tiny.shown(capsys, *again).count("0 of ") == 2
    assert tiny.shown(capsys, *again, "--no-check", "--overwrite").count("not checked") == 2
    assert {name: digest for name, digest in tiny.contents(copied / "gguf").items() if "extra" not in name} == stage
    found = fields_of(copied / "gguf" / "extra" / "draft-f16.gguf")
    assert found["general.name"] == "tiny draft" and found["distill.recipe"] == "tiny"
    shown = tiny.shown(capsys, *again, "--no-check", "--overwrite", "--target", copied / "gguf" / "target-f16.gguf")
    assert "llama-server -m" in shown


@needs_llama
def test_a_check_that_fails_is_in_the_run_and_the_status(
    copied: Path, world: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("distill.export.LIMITS", {16: (-1.0, 0.0)})
    arguments = ("train", world / "recipe.yaml", "--runs", copied.parent)
    (copied / "report.html").unlink()
    assert "draft-f16.gguf: the mean KL is" in tiny.refused(capsys, *arguments, "--redo", "export")
    assert len(read_result(copied / "gguf" / "export.json", ExportReport).faults) == 2
    assert "the mean KL is" in (copied / "log.txt").read_text()
    assert (copied / "report.html").exists()  # the stages after it run
    monkeypatch.undo()
    assert tiny.call(*arguments, "--until", "export") == 2  # until the file is made again
    assert tiny.call(*arguments, "--until", "eval") == 0
