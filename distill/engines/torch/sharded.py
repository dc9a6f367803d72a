"""Models in parts, one in each process (FSDP2): a draft in training, the target where all processes work with it."""

from __future__ import annotations

from typing import Any

import torch

from distill import processes
from distill.engines.torch.hugging_face import load_target
from distill.recipe import Target


def shard(parts: list[Any], whole: torch.nn.Module, device: torch.device, ignored: set[Any] | None = None) -> None:
    """Spread a module over the processes: its `parts`, each gathered while it computes, and what else it holds, except
    `ignored` parameters, gathered while the whole does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (processes.process_count(),))
    for part in parts:
        fully_shard(part, mesh=mesh)
    fully_shard(whole, mesh=mesh, ignored_params=ignored)


def load_shared(target: Target, device: torch.device) -> Any:
    """The target of a recipe for a stage in which all processes work with it; each of them must call this.

    Launched for FSDP each holds a part of the layers' weights, unless they are quantised; embeddings and head stay
    whole. Each forward pass is then taken by all at once, on whatever tokens each one has: `processes.meet`.
    """
    if not processes.shards() or target.quantise is not None:
        return load_target(target, device)
    model = load_target(target, torch.device("cpu"))  # a device may not hold it whole
    trunk = model.base_model
    inside = {parameter for layer in trunk.layers for parameter in layer.parameters()}
    outside = {parameter for parameter in model.parameters() if parameter not in inside}
    shard(list(trunk.layers), trunk, device, outside)
    for parameter in outside:
        parameter.data = parameter.data.to(device)
    helps = False

    def announce(*_: Any) -> None:
        if not helps:
            processes.any_process(True)

    def help_others() -> None:
        nonlocal helps
        helps = True
        with torch.no_grad():
            trunk(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device), use_cache=False)
        helps = False

    help_others()  # makes the buffers of gathered weights: made in inference mode, they would serve there alone
    trunk.register_forward_pre_hook(announce, prepend=True)
    processes.help_with(help_others)
    return model
