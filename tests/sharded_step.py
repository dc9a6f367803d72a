"""One process of two: a step of a sharded learner beside the same step of a whole one (see test_training.py)."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import torch
import toys
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from distill.packing import pack
from distill.target.head import Head
from distill.training.losses import LossSettings
from distill.training.plan import PlannedPart
from distill.training.step import Columns, Learner

torch.distributed.init_process_group("gloo")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
cpu = torch.device("cpu")
target = toys.toy(seed=5)
texts = [[3, 9, 4, 8, 2, 7, 5], [11, 6, 14, 12, 1], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
blocks = pack([(ids, 1) for ids in texts], 16, split_long=False)
part = PlannedPart("x", 0, 1, 1.0, LossSettings({"forward_kl": 0.5, "lk_hybrid": 0.5}))
whole = Learner(toys.toy(seed=0, tie_word_embeddings=False), Columns(61, None, cpu), 4, 3)
sharded = copy.deepcopy(whole)
mesh = init_device_mesh("cpu", (ranks,))
for layer in sharded.draft.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(sharded, mesh=mesh)


def laws(mine: object) -> object:
    count = int(mine.mask.sum())  # type: ignore[attr-defined]
    states = torch.randn(count, 32, generator=torch.Generator().manual_seed(1))
    return Head.of(target, 61).teacher(states)


mine = blocks.take(slice(rank, None, ranks))
total, _ = sharded(mine, laws(mine), part)
total.backward()
expected = []
for other in range(ranks):
    theirs = blocks.take(slice(other, None, ranks))
    loss, _ = whole(theirs, laws(theirs), part)
    loss.backward()
errors = []
for (name, a), (_, b) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
    assert a.grad is not None and b.grad is not None, name
    found = a.grad.full_tensor() * ranks  # shards hold the mean over processes
    errors.append(float((found - b.grad).abs().max() / b.grad.abs().max().clamp(min=1e-6)))
for learner in (sharded, whole):
    if learner is whole:
        for parameter in whole.parameters():
            parameter.grad /= ranks
    torch.optim.SGD(learner.parameters(), lr=0.1).step()
state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    weight_error = max(float((state[name] - value).abs().max()) for name, value in whole.state_dict().items())
    is_sharded = any(p.to_local().numel() < p.numel() for p in sharded.parameters())
    facts = {"gradient_error": max(errors), "weight_error": weight_error, "sharded": is_sharded}
    Path(sys.argv[1], "found.json").write_text(json.dumps(facts))
torch.distributed.destroy_process_group()
