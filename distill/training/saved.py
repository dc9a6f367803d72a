"""Checkpoints of a training, and its record: lines of metrics.jsonl, and training.json.

The main process writes the checkpoints, which do not depend on the number of processes. A step's random numbers are a
pure function of seed and step, so a checkpoint needs only weights, optimizer and a few counters.
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

CHECKPOINTS_KEPT = 2
ACCEPTANCE_STAGE = "acceptance"  # the stage of lines on evaluated weights


@dataclass(frozen=True)
class TrainingStep:
    """A training step: means over the tokens of its batch, the pace so far and the peak memory."""

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
    """The acceptance of weights on the target's stored validation answers, under the served sampler and the protocol.

    Acceptance is the mean chance that a drafted token is accepted; NaN if there is no position. `acceptance` is the
    lower bound that the stored distributions allow, and weights are chosen by it. `most` is the upper bound. Both are
    equal for whole distributions. `interval` is the interval of `acceptance` over answers. `gain` is its difference to
    the best earlier weights, paired by answer; None for the first weights.
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
        """The figures in words."""
        if math.isnan(self.acceptance):
            return "no acceptance: there is no position of a validation answer"
        figures = f"{self.acceptance:.3f}"
        if self.interval is not None:
            figures += f" [{self.interval.low:.3f}, {self.interval.high:.3f}]"
        if self.most - self.acceptance > 0.0005:
            figures += f" at least, {self.most:.3f} at most,"
        gain = (
            ""
            if self.gain is None
            else f", {self.gain.mean:+.4f} [{self.gain.low:+.4f}, {self.gain.high:+.4f}] to the best before"
        )
        return (
            f"acceptance probability {figures} at {self.positions} positions of {self.answers} validation answers{gain}"
        )


@dataclass(frozen=True)
class Evaluation(EvaluatedWeights):
    """An evaluation with the tokens that had counted in the loss before it; None in lines of older versions."""

    tokens: int | None = None


REMEDY = (  # for `TrainingSummary.warning`
    "train longer (train.steps) on more answers (answers.prompts), try half of train.rate, or judge on more "
    "validation prompts (train.acceptance.prompts, and as many questions or documents)"
)


FRESH_EPOCHS, MOST_EPOCHS = 3, 10


def freshness(epochs: float, patience: int | None = None) -> str:
    """Advice about the number of epochs, after a colon; empty for few epochs.

    Planned epochs under a `patience` (train.acceptance.patience) are an upper bound, so nothing is advised.
    """
    if not epochs > FRESH_EPOCHS:
        return ""
    if patience:
        return f"; fewer if acceptance stops rising (train.acceptance.patience {patience})"
    heart = f"more than {MOST_EPOCHS} epochs memorise it; " if epochs > MOST_EPOCHS else ""
    gain = "acceptance rose by 0.03 to 0.04 with twice the answers"
    return f": {heart}{gain}: ask for more (answers.prompts, more questions or documents), or lower train.steps"


@dataclass(frozen=True)
class TrainingSummary:
    """The content of training.json.

    `loss` has the weights of the losses. `best` are the chosen weights; None if none were chosen. `epochs` counts the
    passes over the text. `answers` is the share of scored positions in the target's answers; the others are in given
    text.
    """

    steps: int
    processes: int
    rate: float
    loss: dict[str, float]
    best: EvaluatedWeights | None
    epochs: Figure = math.nan
    answers: float = 1.0

    def words(self, patience: int | None = None) -> str:
        """Describe the epochs, and the shares of answers and given text. `patience` is that of planned epochs."""
        given = f", {1 - self.answers:.0%} of it given text, the rest the target's answers" if self.answers < 1 else ""
        return f"{self.epochs:.1f} epochs of the training text{given}{freshness(self.epochs, patience)}"

    @property
    def warning(self) -> str | None:
        """A warning if the weights before the first step were chosen; None if training helped."""
        if self.best is None or self.best.step != 0:
            return None
        return (
            "Training did not help: no trained weights were accepted more often on validation answers than the "
            f"untrained cut, which is the draft ({self.best.words})."
        )


def _of(lines: Iterable[dict[str, Any]], stage: str, kind: type[Result]) -> list[Result]:
    """The lines of a stage that name a step, ordered by step. The last line of a repeated step counts."""
    last = {line["step"]: line for line in lines if line.get("stage") == stage and has_form(line, {"step": int})}
    return [from_json(last[step], kind, "metrics.jsonl") for step in sorted(last)]


def training_steps(lines: Iterable[dict[str, Any]]) -> list[TrainingStep]:
    """The training steps among the lines of metrics.jsonl, in order."""
    return _of((line for line in lines if "loss" in line), "train", TrainingStep)


def evaluated_weights(lines: Iterable[dict[str, Any]]) -> list[Evaluation]:
    """The evaluations of weights among the lines of metrics.jsonl, in order."""
    return _of(lines, ACCEPTANCE_STAGE, Evaluation)


def trained_tokens(steps: Iterable[TrainingStep]) -> int:
    """The tokens that counted in the loss over all steps."""
    return sum(step.tokens for step in steps)


# ── Checkpoints ──

BEST = "best"  # the chosen weights
DIGESTS = "digests.json"  # checksums of the other files of a folder


def checkpoints(folder: Path) -> list[Path]:
    """The folders step-NNNNNN in the order of their steps. Steps from a million on have more digits."""
    folders = [path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{6,12}", path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("step-")))


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint. state.json is written last."""
    complete = [path for path in checkpoints(folder) if (path / "state.json").exists()]
    return complete[-1] if complete else None


def plain(learner: torch.nn.Module) -> torch.nn.Module:
    """The learner without DDP's wrapper, so that its parameters have their plain names."""
    return learner.module if isinstance(learner, torch.nn.parallel.DistributedDataParallel) else learner


def _learning(learner: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that learn by their plain names: all of them, or only the adapters' on a frozen base."""
    return {name: parameter for name, parameter in plain(learner).named_parameters() if parameter.requires_grad}


def _on_cpu(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors (and numbers) on the CPU."""
    return {k: v.detach().cpu() if isinstance(v, torch.Tensor) else v for k, v in tensors.items()}


def present_weights(learner: torch.nn.Module) -> dict[str, Any]:
    """The parameters that learn, on the CPU."""
    return _on_cpu(_learning(learner))


@torch.no_grad()
def set_weights(learner: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Set the parameters to the result of `present_weights`. Raises ValueError if they do not fit."""
    learning = _learning(learner)
    if sorted(weights) != sorted(learning):
        raise ValueError("it holds other parameters")
    for name, parameter in learning.items():
        if weights[name].shape != parameter.shape:
            raise ValueError(f"{name} is {[*weights[name].shape]}, not {[*parameter.shape]}")
        parameter.copy_(weights[name])


def _moments(learner: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """The optimizer's state on the CPU, by the names of parameters."""
    names = {id(parameter): name for name, parameter in _learning(learner).items()}
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {"state": {names[id(p)]: _on_cpu(state) for p, state in optimizer.state.items()}, "param_groups": groups}


def _set_moments(learner: torch.nn.Module, optimizer: Any, moments: dict[str, Any]) -> None:
    """Set the optimizer's state to the result of `_moments`. Raises ValueError or torch's error if it does not fit."""
    names = {id(parameter): name for name, parameter in _learning(learner).items()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]  # torch's numbers of parameters
    saved = [name for group in moments["param_groups"] for name in group["params"]]
    if sorted(saved) != sorted(order):
        raise ValueError("its optimizer held other parameters")
    state = {order.index(name): values for name, values in moments["state"].items()}
    present = optimizer.state_dict()["param_groups"]
    groups = [{**group, "params": now["params"]} for group, now in zip(moments["param_groups"], present, strict=True)]
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _check_digests(folder: Path) -> None:
    """Raise ValueError for a file that differs from the checksum in digests.json."""
    for name, expected in (read_json(folder / DIGESTS, {...: str}) if (folder / DIGESTS).exists() else {}).items():
        if Path(name).name != name or not (folder / name).is_file() or file_digest(folder / name) != expected:
            raise ValueError(f"{name} does not have its recorded checksum")


def _save(run: Run, name: str, learner: torch.nn.Module, state: dict[str, Any], optimizer: Any = None) -> None:
    """Write checkpoints/`name` with the present weights, `state`, and the optimizer's state if one is given."""
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
    """Write checkpoints/step-NNNNNN with `state`, and keep the newest CHECKPOINTS_KEPT, in the main process."""
    _save(run, f"step-{step:06d}", learner, {**state, "step": step}, optimizer)
    for old in checkpoints(run.path("checkpoints"))[:-CHECKPOINTS_KEPT] if is_main() else ():
        shutil.rmtree(old)


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True, map_location="cpu")


def load_checkpoint(path: Path, learner: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Restore weights and optimizer. Returns the saved state with `step`. Raises DataError for damaged files."""
    with _damage_explained(f"checkpoint {path} is damaged", f"delete {path} to go on from the one before"):
        _check_digests(path)
        weights, moments = _load(path / "model.pt"), _load(path / "optimizer.pt")
        set_weights(learner, weights)
        _set_moments(learner, optimizer, moments)
    return read_json(path / "state.json", {"step": int})


@contextlib.contextmanager
def _damage_explained(what: str, hint: str) -> Iterator[None]:
    """Turn the many kinds of torch's errors for a damaged file into a DataError."""
    try:
        yield
    except DistillError:
        raise
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        raise DataError(f"{what}: {type(error).__name__}: {first}", hint) from error


def save_weights(run: Run, name: str, learner: torch.nn.Module, step: int) -> None:
    """Save the present weights, after `step` steps, as checkpoints/`name`. Every process must call this."""
    _save(run, name, learner, {"step": step})
    barrier()  # No process reads the weights earlier.


def step_of_weights(run: Run, name: str) -> int | None:
    """The step after which the weights in checkpoints/`name` were saved; None if there are none."""
    path = run.path("checkpoints", name, "state.json")
    return int(read_json(path, {"step": int})["step"]) if path.exists() else None


def load_weights(run: Run, name: str, learner: torch.nn.Module) -> None:
    """Load the weights of checkpoints/`name`. Raises DataError if the file is missing or damaged."""
    path = run.path("checkpoints", name, "model.pt")
    with _damage_explained(f"{path} is missing or damaged", "run `distill train RECIPE --redo train`"):
        _check_digests(path.parent)
        set_weights(learner, _load(path))
