"""The teacher store is read ahead of the training loop."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import Patch

from distill.devices import AHEAD, read_ahead
from distill.engines.torch.blocks import Packed
from distill.recipe import Train
from distill.teacher import store
from distill.training.setup import Training


def test_blocks_are_read_before_they_are_needed(tmp_path: Path, monkeypatch: Patch) -> None:
    """Of a store of 50 million positions, whose 48 shards are links to one: all by another thread, in the order of the
    steps and each once; when the loop asks for a step it lies ready, if its own step takes as long as the reading."""
    n = S = 1024
    ids = torch.randint(61, (n, S), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    blocks = Packed(ids, torch.zeros(n, S, dtype=torch.int32), torch.ones(n, S, dtype=torch.bool))
    one = torch.ones(n * S, dtype=torch.uint8)
    entries = {
        "entries": one,
        "top_ids": ids.flatten(),
        "top_log_probabilities": -one.half(),
        "log_tails": -one.float(),
    }
    (tmp_path / "teacher" / "train").mkdir(parents=True)
    first = store.shard_path(tmp_path / "teacher" / "train", 0)
    store.save_shard(first, store.shard_tensors(blocks, lambda part: entries, n))
    for number in range(1, 48):
        store.shard_path(first.parent, number).hardlink_to(first)
    manifest = {"kind": "compact", "vocabulary": 61, "shard_blocks": [n] * 48, "answer_blocks": 48 * n}
    monkeypatch.setattr(store, "read_manifest", lambda *_: manifest)
    readers, read_of = set[str](), store.TeacherStore.read

    def read_noted(self: Any, numbers: torch.Tensor) -> store.StoredBlocks:
        readers.add(threading.current_thread().name)
        return read_of(self, numbers)

    monkeypatch.setattr(store.TeacherStore, "read", read_noted)
    run: Any = SimpleNamespace(path=tmp_path.joinpath, verify=lambda *_: None)
    process: Any = SimpleNamespace(process_index=0, num_processes=1, device=torch.device("cpu"))
    recipe: Any = SimpleNamespace(train=Train(batch=8, micro_batch=4, steps=20), seed=0)
    work = Training(recipe, run, process, None, store.TeacherStore(run), *[None] * 4)  # type: ignore[arg-type]
    assert int(work.counts.sum()) == 48 * n * S and work.scored(3) == 8 * S
    done, read = list[int](), work.read
    work.read = lambda step: (read(step), done.append(step))[0]  # type: ignore[method-assign, func-returns-value]
    found = []
    for step in range(20):
        assert step == 0 or step in done, "the loop would wait"
        found.append(work.batches(step))
        deadline = time.monotonic() + 60
        while len(done) < min(step + 1 + AHEAD, 20) and time.monotonic() < deadline:
            time.sleep(0.001)  # the step
    assert done == list(range(20)) and all(name.startswith("distill-reader") for name in readers)
    for step in (0, 7, 19):
        for own, again in zip(found[step], read(step), strict=True):
            assert torch.equal(own.numbers, again.numbers) and torch.equal(own.blocks.ids, again.blocks.ids)
            assert all(map(torch.equal, own.tensors, again.tensors))
    work.read = lambda step: 1 / 0  # type: ignore[method-assign, assignment]
    with pytest.raises(ZeroDivisionError):
        read_ahead(work.read, 1, process.device)(0)
