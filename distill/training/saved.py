"""What a training saves: checkpoints of its weights and state, written by the main process, the same for any number of
processes; and its record, lines of metrics.jsonl and training.json.

A step's random numbers are a pure function of seed and step, so weights, optimizer and a few counters are enough.
"""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distill.devices import barrier, is_main
from distill.errors import DataError, DistillError
from distill.files import Figure, Result, file_digest, from_json, has_form, read_json, write_folder, write_json
from distill.run import Run
from distill.tables import Interval

# ── The record: lines of metrics.jsonl and training.json as dataclasses ──

KEPT = 2  # checkpoints
ACCEPTANCE_STAGE = "acceptance"  # of the lines on evaluated weights


@dataclass(frozen=True)
class TrainingStep:
    """One training step: means per token of its batch, the pace so far and the peak memory."""

    step: int
    loss: Figure
    forward_kl: Figure = math.nan
    cross_entropy: Figure = math.nan
    agreement: Figure = math.nan
    rate: Figure = math.nan
    tokens: int = 0
    tokens_per_second: Figure = math.nan
    memory_bytes: int | None = None
    time: str | None = None


@dataclass(frozen=True)
class EvaluatedWeights:
    """Weights whose acceptance was measured on the stored validation answers of the target, under the served sampler
    and the recipe's protocol: the mean chance that a drafted token is accepted; NaN if there is no position.

    `acceptance` is the least that the stored distributions allow, and chooses; `most` is the largest (equal where they
    are whole). `interval` is that of the least over answers, `gain` that of its difference to the best weights before,
    paired by answer; None for the first weights.
    """

    step: int
    acceptance: Figure
    most: Figure = math.nan
    positions: int = 0
    answers: int = 0
    interval: Interval | None = None
    gain: Interval | None = None

    @property
    def words(self) -> str:
        """Its figures."""
        if math.isnan(self.acceptance):
            return "no acceptance: there is no position of a validation answer"
        found = f"{self.acceptance:.3f}"
        if self.interval is not None:
            found += f" [{self.interval.low:.3f}, {self.interval.high:.3f}]"
        if self.most - self.acceptance > 0.0005:
            found += f" at least, {self.most:.3f} at most,"
        gain = (
            ""
            if self.gain is None
            else f", {self.gain.mean:+.4f} [{self.gain.low:+.4f}, {self.gain.high:+.4f}] to the best before"
        )
        return (
            f"acceptance probability {found} at {self.positions} positions of {self.answers} validation answers{gain}"
        )


@dataclass(frozen=True)
class Evaluation(EvaluatedWeights):
    """An evaluation with the tokens that had counted in the loss; None in lines of older versions."""

    tokens: int | None = None


REMEDY = (  # for `TrainingSummary.warning`
    "train longer (train.steps) on more answers (answers.prompts), try half of train.rate, or judge on more "
    "validation prompts (train.acceptance.prompts, and as many questions or documents)"
)


FRESH_EPOCHS, MOST_EPOCHS = 3, 10


def freshness(epochs: float) -> str:
    """What to do about as many epochs, after a colon; nothing for few."""
    if not epochs > FRESH_EPOCHS:
        return ""
    heart = f"more than {MOST_EPOCHS} learn it by heart; " if epochs > MOST_EPOCHS else ""
    gain = "acceptance rose by 0.03 to 0.04 with twice the answers"
    return f": {heart}{gain}: ask for more (answers.prompts, more questions or documents), or lower train.steps"


@dataclass(frozen=True)
class TrainingSummary:
    """training.json: how many steps were trained, the peak rate, the losses with their weights, and the weights that
    were taken; `best` is None where none were chosen. `epochs` say how often the text was seen, `answers` which share
    of its scored positions are the target's answers; the others are given text."""

    steps: int
    processes: int
    rate: float
    loss: dict[str, float]
    best: EvaluatedWeights | None
    epochs: Figure = math.nan
    answers: float = 1.0

    @property
    def text(self) -> str:
        """What was learnt from, and how often."""
        given = f", {1 - self.answers:.0%} of it given text, the rest the target's answers" if self.answers < 1 else ""
        return f"{self.epochs:.1f} epochs of the training text{given}{freshness(self.epochs)}"

    @property
    def warning(self) -> str | None:
        """What to know where the weights from before the first step were taken; None where training helped."""
        if self.best is None or self.best.step != 0:
            return None
        return (
            "Training did not help: no weights that it made were accepted more often on validation answers than those "
            f"before its first step, so the draft is the untrained cut ({self.best.words})."
        )


def _of(lines: Iterable[dict[str, Any]], stage: str, kind: type[Result]) -> list[Result]:
    """The lines of a stage that name a step, by step; the last line of a repeated step counts."""
    last = {line["step"]: line for line in lines if line.get("stage") == stage and has_form(line, {"step": int})}
    return [from_json(last[step], kind, "metrics.jsonl") for step in sorted(last)]


def training_steps(lines: Iterable[dict[str, Any]]) -> list[TrainingStep]:
    """The training steps among the lines of metrics.jsonl, in order."""
    return _of((line for line in lines if "loss" in line), "train", TrainingStep)


def evaluated_weights(lines: Iterable[dict[str, Any]]) -> list[Evaluation]:
    """The evaluations of weights among the lines of metrics.jsonl, in order."""
    return _of(lines, ACCEPTANCE_STAGE, Evaluation)


def trained_tokens(steps: Iterable[TrainingStep]) -> int:
    """Tokens that counted in the loss, over all steps."""
    return sum(step.tokens for step in steps)


# ── Checkpoints ──

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
    return learner.module if isinstance(learner, torch.nn.parallel.DistributedDataParallel) else learner


def _learning(learner: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn, under their plain names: all, or beside a frozen base those of the adapters."""
    return {name: parameter for name, parameter in plain(learner).named_parameters() if parameter.requires_grad}


def _on_cpu(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors (and numbers) on the CPU."""
    return {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}


def present_weights(learner: torch.nn.Module) -> dict[str, Any]:
    """The parameters that learn, on the CPU."""
    return _on_cpu(_learning(learner))


@torch.no_grad()
def set_weights(learner: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Take the weights that `present_weights` gave; raises ValueError where they do not fit."""
    learning = _learning(learner)
    if sorted(weights) != sorted(learning):
        raise ValueError("it holds other parameters")
    for name, parameter in learning.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(f"{name} is {[*weights[name].shape]}, not {[*parameter.shape]}")
        parameter.copy_(weights[name])


def _moments(learner: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer's state by the names of parameters, on the CPU."""
    names = {id(parameter): name for name, parameter in _learning(learner).items()}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[id(p)]: _on_cpu(own) for p, own in optimizer.state.items()}, "param_groups": groups}


def _set_moments(learner: torch.nn.Module, optimizer: Any, moments: dict[str, Any]) -> None:
    """Take the state that `_moments` gave; raises a ValueError or an error of torch's where it does not fit."""
    names = {id(parameter): name for name, parameter in _learning(learner).items()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]  # torch counts by this order
    saved = [name for group in moments["param_groups"] for name in group["params"]]
    if sorted(saved) != sorted(order):
        raise ValueError("its optimizer held other parameters")
    state = {order.index(name): own for name, own in moments["state"].items()}
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
    if not is_main():
        return
    tensors = {"model.pt": present_weights(learner)}
    if optimizer is not None:
        tensors["optimizer.pt"] = _moments(learner, optimizer)

    def write(folder: Path) -> None:
        for file, content in tensors.items():
            torch.save(content, folder / file)
        write_json(folder / DIGESTS, {file: file_digest(folder / file) for file in tensors})
        write_json(folder / "state.json", state)

    write_folder(run.path("checkpoints", name), write)


def save_checkpoint(run: Run, step: int, learner: torch.nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
    """Write checkpoints/step-NNNNNN with `state` and delete all but the newest KEPT, in the main process."""
    _save(run, f"step-{step:06d}", learner, {**state, "step": step}, optimizer)
    for old in checkpoints(run.path("checkpoints"))[:-KEPT] if is_main() else ():
        shutil.rmtree(old)


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True, map_location="cpu")


def load_checkpoint(path: Path, learner: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Restore weights and optimizer; the saved state with `step`. Raises DataError for damaged files."""
    with _damage_explained(f"checkpoint {path} is damaged", f"delete {path} to go on from the one before"):
        _check_digests(path)
        weights, moments = _load(path / "model.pt"), _load(path / "optimizer.pt")
        set_weights(learner, weights)
        _set_moments(learner, optimizer, moments)
    return read_json(path / "state.json", {"step": int})


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
