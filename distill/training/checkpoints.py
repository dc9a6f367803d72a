"""Checkpoints of a training: written by the main process, the same for any number of processes.

A step's random numbers are a pure function of seed and step, so weights, optimizer and a few counters are enough.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from distill.errors import DataError, DistillError
from distill.files import file_digest, read_json, write_folder, write_json
from distill.processes import barrier, is_main
from distill.run import Run

BEST = "best"  # the chosen weights
DIGESTS = "digests.json"  # checksums of the other files of a folder


def checkpoints(folder: Path) -> list[Path]:
    """The folders step-NNNNNN in the order of their steps, which have more digits from a million on."""
    folders = [path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{6,12}", path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


def newest_checkpoint(folder: Path) -> Path | None:
    """The last checkpoint whose state.json, written last, is there."""
    complete = [path for path in checkpoints(folder) if (path / "state.json").exists()]
    return complete[-1] if complete else None


def plain(learner: torch.nn.Module) -> torch.nn.Module:
    """The learner without the wrapper of several processes, so that its parameters have their plain names."""
    inner: Any = learner.module if isinstance(learner, torch.nn.parallel.DistributedDataParallel) else learner
    return inner


def _learning(learner: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, under their plain names: all, or beside a frozen base those of the adapters."""
    return {name: parameter for name, parameter in plain(learner).named_parameters() if parameter.requires_grad}


def _gathered(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors (and numbers) in the main process, on the CPU; every process must call this where each holds a part."""
    whole: dict[str, Any] = {}
    for name, value in tensors.items():
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        if is_main():
            whole[name] = value.detach().cpu() if isinstance(value, torch.Tensor) else value
    return whole


def _part(whole: Any, parameter: torch.nn.Parameter) -> Any:
    """What a process that holds a part of a parameter holds of a tensor of the same shape."""
    if not hasattr(parameter, "full_tensor") or whole.shape != parameter.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None)


def present_weights(learner: torch.nn.Module) -> dict[str, Any]:
    """The parameters that learn, as `_gathered` gives them."""
    return _gathered(_learning(learner))


@torch.no_grad()
def set_weights(learner: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Take the weights that `present_weights` gave; raises ValueError where they do not fit."""
    learning = _learning(learner)
    if sorted(weights) != sorted(learning):
        raise ValueError("it holds other parameters")
    for name, parameter in learning.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(f"{name} is {[*weights[name].shape]}, not {[*parameter.shape]}")
        parameter.copy_(_part(weights[name], parameter))


def _moments(learner: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer's state by the names of parameters, as `_gathered` gives it. Those that have not learnt yet
    (train.embedding_steps) have none."""
    names = {id(parameter): name for name, parameter in _learning(learner).items()}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[id(p)]: _gathered(own) for p, own in optimizer.state.items()}, "param_groups": groups}


def _set_moments(learner: torch.nn.Module, optimizer: Any, moments: dict[str, Any]) -> None:
    """Take the state that `_moments` gave; raises a ValueError or an error of torch's where it does not fit."""
    learning = _learning(learner)
    names = {id(parameter): name for name, parameter in learning.items()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]  # torch counts by this order
    saved = [name for group in moments["param_groups"] for name in group["params"]]
    if sorted(saved) != sorted(order):
        raise ValueError("its optimizer held other parameters")
    state = {
        order.index(name): {key: _part(value, learning[name]) for key, value in own.items()}
        for name, own in moments["state"].items()
    }
    own_groups = optimizer.state_dict()["param_groups"]
    groups = [{**kept, "params": own["params"]} for kept, own in zip(moments["param_groups"], own_groups, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _check_digests(folder: Path) -> None:
    """Raise ValueError for a file that differs from the checksum in digests.json."""
    for name, expected in (read_json(folder / DIGESTS, {...: str}) if (folder / DIGESTS).exists() else {}).items():
        if Path(name).name != name or not (folder / name).is_file() or file_digest(folder / name) != expected:
            raise ValueError(f"{name} has not the checksum that was recorded when it was written")


def _save(run: Run, name: str, learner: torch.nn.Module, state: dict[str, Any], optimizer: Any = None) -> None:
    """Write checkpoints/`name` with the present weights, the optimizer's state if there is one, and `state`."""
    tensors = {"model.pt": present_weights(learner)}
    if optimizer is not None:
        tensors["optimizer.pt"] = _moments(learner, optimizer)

    def write(folder: Path) -> None:
        for file, content in tensors.items():
            torch.save(content, folder / file)
        write_json(folder / DIGESTS, {file: file_digest(folder / file) for file in tensors})
        write_json(folder / "state.json", state)

    if is_main():
        write_folder(run.path("checkpoints", name), write)


def save_checkpoint(
    run: Run, step: int, learner: torch.nn.Module, optimizer: Any, keep: int, state: dict[str, Any]
) -> None:
    """Write checkpoints/step-NNNNNN with `state` and delete all but the newest `keep`, in the main process; every
    process must call it."""
    _save(run, f"step-{step:06d}", learner, {**state, "step": step}, optimizer)
    for old in checkpoints(run.path("checkpoints"))[:-keep] if is_main() else ():
        shutil.rmtree(old)


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    return content


def load_checkpoint(path: Path, learner: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Restore weights and optimizer; the saved state with `step`. Raises DataError for damaged files."""
    with _damage_explained(f"checkpoint {path} is damaged", f"delete {path} to go on from the one before"):
        _check_digests(path)
        weights, moments = _load(path / "model.pt"), _load(path / "optimizer.pt")
        set_weights(learner, weights)
        _set_moments(learner, optimizer, moments)
    state: dict[str, Any] = read_json(path / "state.json", {"step": int})
    return state


@contextlib.contextmanager
def _damage_explained(what: str, hint: str) -> Iterator[None]:
    """Turn torch's errors for a damaged file, which are of many kinds, into a DataError."""
    try:
        yield
    except DistillError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise DataError(f"{what}: {type(error).__name__}: {first}", hint) from error


def save_weights(run: Run, name: str, learner: torch.nn.Module, step: int) -> None:
    """Keep the present weights, those after `step`, as checkpoints/`name`; every process must call it."""
    _save(run, name, learner, {"step": step})
    barrier()  # before any process reads them


def step_of_weights(run: Run, name: str) -> int | None:
    """The step after which the weights in checkpoints/`name` were kept; None where there are none."""
    path = run.path("checkpoints", name, "state.json")
    return int(read_json(path, {"step": int})["step"]) if path.exists() else None


def load_weights(run: Run, name: str, learner: torch.nn.Module) -> None:
    """Take the weights of checkpoints/`name`; raises DataError when the file is missing or damaged."""
    path = run.path("checkpoints", name, "model.pt")
    with _damage_explained(f"{path} is missing or damaged", "run `distill train RECIPE --redo train`"):
        _check_digests(path.parent)
        set_weights(learner, _load(path))
