"""Shared by the tests of whole runs: a tiny world, and one finished run in it that nobody changes."""

from __future__ import annotations

import functools
import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import typer.main

# A shell starts what it puts in the background (`&`) with SIGINT ignored, and processes inherit that: the tests that
# press Ctrl-C would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """GGUF files are imported to a folder of the tests, in processes that they start too; compiled products, whose
    names hold a digest of their source, are kept from one session to the next."""
    kernels = Path(tempfile.gettempdir(), f"distill-tests-kernels-{os.getuid()}")
    kernels.mkdir(mode=0o700, exist_ok=True)
    cache = tmp_path_factory.mktemp("cache")
    (cache / "kernels").symlink_to(kernels)
    os.environ["DISTILL_CACHE"] = str(cache)


def _fsync(descriptor: int) -> None:
    """Do not wait for the disk, because a killed process loses nothing that was written. Check the descriptor."""
    os.fstat(descriptor)


os.fsync = _fsync
# The command line is the same at each of some thousand calls.
typer.main.get_command = functools.cache(typer.main.get_command)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Compile and load the pretend device before the first test, where one asks for it; see tests/pretend.

    What was imported is never garbage, so no collection of garbage need look at it again."""
    gc.collect()
    gc.freeze()
    if any("pretend" in getattr(item, "fixturenames", ()) for item in session.items):
        import pretend

        try:
            if pretend.absent() is None:
                pretend.load()
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.fixture(name="pretend")
def _pretend() -> Iterator[Any]:
    """The module of the pretend device, which is torch's one accelerator during the test."""
    import pretend

    if (reason := pretend.absent()) is not None:
        pytest.skip(reason)
    import torch

    with pretend.available():
        torch.accelerator.set_device_index(0)
        yield pretend


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For tests of small models, which several threads make slower."""
    with tiny.one_thread():
        yield


@pytest.fixture
def short_texts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Evaluations of any pair go on for so many tokens, instead of 128."""
    from distill.recipe import Evaluate

    monkeypatch.setattr("distill.api.Evaluate", functools.partial(Evaluate, new_tokens=24, file_blocks=8))
    return 24


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with target/, corpus/ and recipe.yaml."""
    folder = tmp_path_factory.mktemp("world")
    tiny.build_world(folder)
    return folder


@pytest.fixture(scope="session")
def plain(world: Path) -> Any:
    """The tokenizer of the world's target, without a chat template; copy it before changing anything."""
    from distill.engines.torch.hugging_face import load_tokenizer

    return load_tokenizer(str(world / "target"))


@pytest.fixture(scope="session")
def ready(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has everything but a trained draft."""
    runs = tmp_path_factory.mktemp("ready")
    with tiny.one_thread():
        code = tiny.call("train", world / "recipe.yaml", "--runs", runs, "--until", "cut")
    assert code == 0
    return runs / "tiny"


@pytest.fixture(scope="session")
def finished(world: Path) -> Iterator[Path]:
    """A finished run of the world's recipe; copy it before changing anything."""
    with tiny.one_thread():
        assert tiny.call("train", world / "recipe.yaml", "--runs", world / "runs") == 0
        yield world / "runs" / "tiny"


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may change; its folder of runs is the parent."""
    shutil.copytree(finished, tmp_path / "runs" / "tiny")
    return tmp_path / "runs" / "tiny"


@pytest.fixture(scope="session")
def gguf_toys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of a toy target and of a draft near it, each beside its folder."""
    from toys import blurred, save_toy, toy, toy_tokenizer

    from distill.gguf.writer import export_gguf

    folder = tmp_path_factory.mktemp("gguf")
    tokenizer = toy_tokenizer()
    target = toy(vocabulary=len(tokenizer), seed=11)
    for name, model in (("target", target), ("draft", blurred(target, 12, 0.015))):
        export_gguf(save_toy(model, tokenizer, folder / name), folder / f"{name}.gguf", "f32")
    return folder / "target.gguf", folder / "draft.gguf"


# The files that take longest, with which test.sh begins: else one process is left with them while the other has none.
LONG = (
    "test_training",
    "test_resume",
    "test_faults",
    "test_server_answers",
    "test_gguf_reference",
    "test_any_pair",
    "test_gguf_options",
    "test_device_rounds",
    "test_unloaded",
    "test_rehearsal",
    "test_exact_decoding",
    "test_decode",
    "test_configurations",
    "test_answering",
    "test_other_vocabulary",
    "test_cli",
    "test_real_server",
    "test_import",
    "test_tokenizers",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files of LONG."""
    places = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))
