"""Model folders of mixed weight files for fuzz.py: one model, saved in parts, and steps that make its files disagree.

A folder passes if every reader refuses it, or reads it as the same values. Then each file of the folder that holds
other values must be named on stderr. The values are compared with those that the safetensors library reads from the
files.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FILES = [SINGLE, *(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)), "model.fp16.safetensors"]
ROPE: list[Any] = [
    None,
    {"rope_type": "default", "rope_theta": 1e6},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
]
CONFIG: list[dict[str, Any]] = [
    {"tie_word_embeddings": False},
    {"tie_word_embeddings": None},
    {"transformers_weights": FILES[1]},
    {"transformers_weights": SINGLE},
    {"quantization_config": {"quant_method": "gptq", "bits": 4}},
]
Step = tuple[Any, ...]
Tensors = dict[str, torch.Tensor]


def steps() -> st.SearchStrategy[tuple[int, list[Step]]]:
    """Return the number of files in which the model is saved, and the steps that follow."""
    file, number = st.sampled_from(FILES), st.integers(0, 40)
    move = st.sampled_from([0.0, 0.0, 1.0])
    one = st.one_of(
        st.tuples(st.just("copy"), number, file, move),  # copies a tensor into a further file
        st.tuples(st.just("move"), number, file),
        st.tuples(st.just("drop"), number),
        st.tuples(st.just("whole"), file, move),  # writes all tensors once more
        st.tuples(st.just("remove"), file),
        st.tuples(st.just("index"), number, st.one_of(st.none(), file)),
        st.tuples(st.just("no index")),
        st.tuples(st.just("head"), file, st.sampled_from([0.0, 1.0, None])),
        st.tuples(st.just("type"), number, st.sampled_from(["bfloat16", "float64", "int32", "float8_e4m3fn"])),
        st.tuples(st.just("narrow"), number),
        st.tuples(st.just("pickle"), st.sampled_from(["pytorch_model.bin", "pytorch_model-00001-of-00001.bin"])),
        st.tuples(st.just("adapter"), st.booleans()),
        st.tuples(st.just("config"), st.sampled_from(CONFIG)),
        st.tuples(st.just("rope"), st.sampled_from(ROPE), st.sampled_from(ROPE), st.sampled_from([None, 5e5])),
    )
    return st.tuples(st.integers(1, 3), st.lists(one, max_size=3))


class Model:
    """A model's files while they are changed. `places` is the index, or None without one."""

    def __init__(self, folder: Path, source: Path, parts: int) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        self.folder, self.tensors = folder, load_file(folder / SINGLE)
        self.names = sorted(self.tensors)
        self.files: dict[str, Tensors] = {SINGLE: dict(self.tensors)}
        if parts > 1:
            shares = {FILES[1 + part]: self.names[part::parts] for part in range(parts)}
            self.files = {file: {name: self.tensors[name] for name in names} for file, names in shares.items()}
        index = {name: file for file, held in self.files.items() for name in held}
        self.places: dict[str, str] | None = index if parts > 1 else None
        self.config = json.loads((folder / "config.json").read_text())

    def take(self, kind: str, *values: Any) -> None:
        """Take one step. Nothing happens if it is impossible."""
        if kind in ("copy", "move", "drop", "type", "narrow"):
            self._change_tensor(kind, self.names[values[0] % len(self.names)], *values[1:])
        elif kind in ("whole", "remove", "head"):
            self._change_file(kind, *values)
        elif kind == "index":
            name = self.names[values[0] % len(self.names)]
            self.places = {other: file for other, file in (self.places or {}).items() if other != name}
            self.places |= {} if values[1] is None else {name: values[1]}
        elif kind == "no index":
            self.places = None
        elif kind == "pickle":
            torch.save({name: tensor + 1 for name, tensor in self.tensors.items()}, self.folder / values[0])
        elif kind == "adapter":
            (self.folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "a/b"}')
            if values[0]:
                (self.folder / "config.json").unlink(missing_ok=True)
        else:
            rope = ("rope_parameters", "rope_scaling", "rope_theta")
            self.config |= values[0] if kind == "config" else dict(zip(rope, values, strict=True))

    def _change_tensor(self, kind: str, name: str, *values: Any) -> None:
        home = next((file for file, held in self.files.items() if name in held), None)
        if home is None:
            return
        tensor = self.files[home].pop(name)
        if kind == "copy":
            self.files[home][name] = tensor
            self.files.setdefault(values[0], {})[name] = tensor + values[1]
        elif kind == "move":
            self.files.setdefault(values[0], {})[name] = tensor
        elif kind != "drop":
            self.files[home][name] = tensor[:-1].clone() if kind == "narrow" else tensor.to(getattr(torch, values[0]))

    def _change_file(self, kind: str, file: str, move: float | None = None) -> None:
        if kind == "remove":
            self.files.pop(file, None)
        elif kind == "whole":
            self.files[file] = {name: tensor + move for name, tensor in self.tensors.items()}
        else:
            embedding = self.tensors[EMBEDDING]
            self.files.setdefault(file, {})[HEAD] = embedding[1:].clone() if move is None else embedding + move
            if self.places is not None:
                self.places[HEAD] = file

    def write(self) -> None:
        """Write all files."""
        (self.folder / SINGLE).unlink()
        for file, held in self.files.items():
            save_file(held, self.folder / file, {"format": "pt"})
        if self.places is not None:
            (self.folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self.places}))
        if (self.folder / "config.json").is_file():
            (self.folder / "config.json").write_text(json.dumps(self.config))


def readers_of(folder: Path, target: Path) -> list[Callable[[], Any]]:
    """Return the readers that commands call on a folder, and then the comparison of their results."""
    from distill.engines.torch.hugging_face import check_weights, load_model
    from distill.gguf.fields import read_shape
    from distill.gguf.writer import read_tensors
    from distill.progress import warn_once
    from distill.surgery.vocabulary import check_transplant

    found: dict[str, Tensors] = {}
    rope: dict[str, Any] = {}
    said = io.StringIO()
    warn_once.cache_clear()

    def load() -> None:
        with contextlib.redirect_stderr(said):
            model = load_model(str(folder), "float32", torch.device("cpu"))
        found["load"] = model.state_dict()
        rope["load"] = model.config.rope_parameters

    def export() -> None:
        shape = read_shape(folder)
        tensors = {tensor.name: tensor for tensor in read_tensors(folder, shape)}
        found["export"] = {
            name: torch.from_numpy(tensors[gguf].read(0, tensors[gguf].shape[0]).copy())
            for path in folder.glob("*.safetensors")
            for name in load_file(path)
            if (gguf := shape.gguf_name(name)) in tensors
        }
        found["export"].setdefault(HEAD, found["export"][EMBEDDING])  # as llama.cpp does
        rope["export"] = {"rope_theta": shape.rope_theta, **shape.rope}

    def transplant() -> None:
        found["transplant"] = {
            name: tensor.read().float() for name, tensor in check_transplant(folder, target).tensors.items()
        }

    def compare() -> None:
        expected = found.get("load") or found.get("export") or found.get("transplant")
        if expected is None:
            return
        for reader, tensors in found.items():
            for name, value in tensors.items():
                assert name not in expected or torch.equal(value, expected[name]), f"{reader} has another {name}"
        if len(rope) == 2:
            for key in ("rope_theta", "rope_type", "factor"):
                assert rope["load"].get(key) == rope["export"].get(key), f"{key}: {rope}"
        assert not (folder / "adapter_config.json").exists(), "an adapter was left out"
        for path in sorted(folder.glob("*.safetensors")):
            for name, value in load_file(path).items():
                same = name in expected and torch.equal(value.float(), expected[name])
                assert same or path.name in said.getvalue() or "load" not in found, f"{name} of {path.name} went unsaid"
        for path in folder.glob("*.bin"):
            assert path.name in said.getvalue() or "load" not in found, f"{path.name} went unsaid"

    return [load, export, transplant, lambda: check_weights(str(folder)), compare]
