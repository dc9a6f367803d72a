"""Checkpoints of a training: whole, from the main process, however many there are and however weights are sharded.

A step's random numbers are a pure function of seed and step: weights, optimizer and a few counters are all there is.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError
from distill.files import read_json, write_folder, write_json
from distill.processes import barrier
from distill.run import Run

BEST = "best"  # the weights that are taken, unless a replay is kept
REPLAYED = "replayed"


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint whose state.json, written last, is there."""
    found = sorted(path for path in folder.glob("step-*") if (path / "state.json").exists())
    return found[-1] if found else None


def _options(learner: torch.nn.Module) -> Any:
    """Whole tensors on the CPU; what is frozen (under adapters) is that of init/ and stays out."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    frozen = any(not parameter.requires_grad for parameter in learner.parameters())
    return StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=frozen, strict=not frozen)


def whole_weights(learner: torch.nn.Module) -> dict[str, Any]:
    """The weights that learn, on the CPU, under their plain names; every process must call it.

    Where they are sharded, only the main process gets them.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    return _learning(learner, get_model_state_dict(learner, options=_options(learner)))


def _learning(learner: torch.nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Without what is frozen: the other name of a tied head is not left out by torch."""
    frozen = {name for name, value in learner.named_parameters(remove_duplicate=False) if not value.requires_grad}
    return {name: value for name, value in weights.items() if name not in frozen}


def save_checkpoint(
    run: Run, step: int, learner: torch.nn.Module, optimizer: Any, keep: int, state: dict[str, Any], main: bool = True
) -> None:
    """Write checkpoints/step-NNNNNN with `state` and forget all but the newest `keep`; every process must call it."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(learner, optimizer, options=_options(learner))
    if not main:
        return
    folder = run.path("checkpoints")

    def write(temporary: Path) -> None:
        torch.save(_learning(learner, weights), temporary / "model.pt")
        torch.save(moments, temporary / "optimizer.pt")
        write_json(temporary / "state.json", {**state, "step": step})

    write_folder(folder / f"step-{step:06d}", write)
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(path: Path, learner: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Restore weights and optimizer; the saved state with `step`. Raises DataError when the files are damaged."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    try:
        weights = torch.load(path / "model.pt", weights_only=True, map_location="cpu")
        moments = torch.load(path / "optimizer.pt", weights_only=True, map_location="cpu")
        set_state_dict(
            learner, optimizer, model_state_dict=weights, optim_state_dict=moments, options=_options(learner)
        )
    except Exception as error:  # torch raises many kinds for a damaged file
        raise DataError(
            f"checkpoint {path} is damaged: {str(error).splitlines()[0]}", f"delete {path} to go on from the one before"
        ) from error
    found: dict[str, Any] = read_json(path / "state.json")
    return found


def save_weights(run: Run, name: str, learner: torch.nn.Module, main: bool = True) -> None:
    """Keep the present weights as checkpoints/`name`; every process must call it."""
    weights = whole_weights(learner)
    if main:
        write_folder(run.path("checkpoints", name), lambda temporary: torch.save(weights, temporary / "model.pt"))
    barrier()  # before any process reads them


def load_weights(run: Run, name: str, learner: torch.nn.Module) -> None:
    """Take the weights of checkpoints/`name`; raises DataError when the file is missing or damaged."""
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    path = run.path("checkpoints", name, "model.pt")
    try:
        weights = torch.load(path, weights_only=True, map_location="cpu")
        set_model_state_dict(learner, weights, options=_options(learner))
    except Exception as error:
        raise DataError(
            f"{path} is missing or damaged: {str(error).splitlines()[0]}", "run `distill train RECIPE --redo train`"
        ) from error
