"""One process of two: a step of a sharded learner beside the same step of a whole one (see test_training.py).

In fp32, and in bf16 under the policy that training sets. There are three blocks, so that one process has none for its
second forward pass.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import toys
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from distill.packing import pack
from distill.processes import leave
from distill.teacher.distributions import Head
from distill.training.losses.settings import LossSettings
from distill.training.plan import PlannedPart
from distill.training.setup import exact_outside
from distill.training.step import Columns, Learner, scored_blocks, split_blocks

torch.distributed.init_process_group("gloo")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
cpu = torch.device("cpu")
target = toys.toy(seed=5)
texts = [[3, 9, 4, 8, 2, 7, 5, 1, 2], [11, 6, 14, 12, 1, 4, 3, 7], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
packed = pack([(ids, 1) for ids in texts], 12, split_long=False)
states = torch.randn(len(packed), 12, 32, generator=torch.Generator().manual_seed(1))
part = PlannedPart("x", 0, 1, 1.0, LossSettings({"forward_kl": 0.5, "lk_hybrid": 0.5}))
accelerates = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)  # what it makes of bf16


def distributions(index: torch.Tensor, device: torch.device) -> Any:
    return Head.of(target, 61).teacher(states[index][packed.mask[index]])


source: Any = SimpleNamespace(packed=packed, blocks=len(packed), vocabulary=61, teacher=distributions)


def step(learner: Any, rank: int, short: bool) -> tuple[int, Any]:
    """Add up this process's gradients; its forward passes and the sums of its log."""
    vector = None
    pieces = split_blocks(torch.arange(len(packed)), rank, ranks, 1)
    for piece in pieces:
        with torch.autocast("cpu", torch.bfloat16, enabled=short):
            total, sums = learner(*scored_blocks(source, piece, cpu), part)
        total.backward()
        vector = sums.vector if vector is None else vector + sums.vector
    return len(pieces), vector


def compare(policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """The largest differences of gradients, weights after a step and what is logged; `distance` is of all at once."""
    short = policy.param_dtype is not None
    whole = Learner(toys.toy(seed=0, tie_word_embeddings=False), Columns(61, None, cpu), 4)
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in sharded.draft.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(sharded, mesh=mesh, mp_policy=policy)
    passes, logged = step(sharded, rank, short)
    errors, off, length = [], 0.0, 0.0
    expected = [step(whole, other, False)[1] for other in range(ranks)]
    for (name, a), (_, b) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.dtype == torch.float32, name
        found = a.grad.full_tensor() * ranks  # shards hold the mean over processes
        errors.append(float((found - b.grad).abs().max() / b.grad.abs().max().clamp(min=1e-6)))
        off, length = off + float((found - b.grad).square().sum()), length + float(b.grad.square().sum())
    for parameter in whole.parameters():
        parameter.grad /= ranks
    for learner in (sharded, whole):
        torch.optim.SGD(learner.parameters(), lr=0.1).step()
    state = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    own = expected[rank]
    return {
        "gradient_error": max(errors),
        "gradient_distance": (off / length) ** 0.5,
        "weight_error": max(float((state[name] - value).abs().max()) for name, value in whole.state_dict().items())
        if rank == 0
        else 0.0,
        "log_error": float(((logged - own).abs() / own.abs().clamp(min=1e-6)).max()),
        "log_type": str(logged.dtype),
        "positions": float(logged[0]) - float(own[0]),
        "passes": passes,
        "sharded": any(p.to_local().numel() < p.numel() for p in sharded.parameters()),
    }


found = {"float32": compare(MixedPrecisionPolicy()), "bfloat16": compare(exact_outside(accelerates))}
gathered: list[Any] = [None] * ranks
torch.distributed.all_gather_object(gathered, found)
if rank == 0:
    Path(sys.argv[1], "found.json").write_text(json.dumps(gathered))
leave()
