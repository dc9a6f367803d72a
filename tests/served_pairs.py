"""GGUF pairs for a real llama-server: the demo target, and drafts that are that target with noise on its weights.

Each variant makes one difference that costs acceptance, and none without the option that it is for.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tiny
import torch
import toys

from distill.data.samples import Sample
from distill.errors import ServingError
from distill.serving.check import kind_of_server
from distill.serving.server import Http

TARGET = tiny.ROOT / "data" / "demo-target"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = "§¤"  # bytes that no prompt has
OTHER_TEMPLATE = "{% for m in messages %}§¤ {{ m['content'] }} ¤§{% endfor %}"
NOISE = 0.1  # of each matrix's deviation: about half of the drafted tokens are accepted


def save(model: Any, folder: Path, name: str) -> Path:
    """The model as folder/NAME.gguf."""
    from distill.engines.torch.hugging_face import load_tokenizer
    from distill.gguf.writer import export_gguf

    model.save_pretrained(folder / name)
    tokenizer = load_tokenizer(str(TARGET))
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder / name)
    export_gguf(folder / name, folder / f"{name}.gguf", "f16")
    return folder / f"{name}.gguf"


@torch.no_grad()
def with_key_outliers(model: Any, scale: float = 512.0) -> Any:
    """The same function with one rotary pair of every key scaled, as Qwen2.5's are, and of every query by the inverse.

    A power of two: fp32 and f16 lose nothing. Blocks of 32 values with a common scale, such as q4_0, lose all others.
    """
    changed = copy.deepcopy(model)
    config = changed.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for layer in changed.model.layers:
        for part, factor in ((layer.self_attn.k_proj, scale), (layer.self_attn.q_proj, 1 / scale)):
            for start in range(0, part.weight.shape[0], size):
                for row in (start, start + size // 2):
                    part.weight[row] *= factor
                    if part.bias is not None:
                        part.bias[row] *= factor
    return changed


@torch.no_grad()
def deaf_to(model: Any, text: str) -> Any:
    """The model with other embeddings for the tokens of a text, as those are that training never met: it drafts badly
    behind such a text."""
    from distill.engines.torch.hugging_face import load_tokenizer

    changed = copy.deepcopy(model)
    ids = load_tokenizer(str(TARGET))(text, add_special_tokens=False)["input_ids"]
    weight = changed.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(3)
    weight[ids] = 8 * weight.std() * torch.randn(len(ids), weight.shape[1], generator=generator)
    return changed


def prompts(
    target: Path, size: int, shortest: int = 0, render: Callable[[str], str] = str, count: int = 8
) -> list[Sample]:
    """Pieces of code of the test split, `size` characters each of files longer than `shortest`, as `render` puts
    them."""
    from distill.gguf.library import GgufFile

    texts = [path.read_text(encoding="utf-8") for path in sorted((tiny.ROOT / "data" / "test").rglob("*.py"))]
    pieces = [text[start : start + size] for text in texts for start in (400, 1600) if len(text) > shortest][:count]
    with contextlib.closing(GgufFile(target, vocabulary_only=True)) as file:
        ids = [file.tokenize(render(piece), parse_special=True) for piece in pieces]
    return [Sample(str(place), one) for place, one in enumerate(ids)]


def build(folder: Path) -> dict[str, Path]:
    """target, draft, outliers (a draft for q4_0 keys), chat (a draft for one template), other (of another target)."""
    from distill.engines.torch.hugging_face import load_model

    target = load_model(str(TARGET), "float32", torch.device("cpu"))
    draft = toys.blurred(target, 0, NOISE)
    elsewhere = toys.blurred(toys.blurred(target, 1, 3 * NOISE), 2, NOISE)
    models = {
        "target": target,
        "draft": draft,
        "outliers": with_key_outliers(draft),
        "chat": deaf_to(draft, MARKS),
        "other": elsewhere,
    }
    return {name: save(model, folder, name) for name, model in models.items()}


@contextlib.contextmanager
def served(program: str, command: str, log: Path, seconds: float = 300.0) -> Iterator[str]:
    """The address of what a printed command of vLLM serves."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [program, *shlex.split(command.replace("\\\n", " "))[1:]]
    words += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
    words += ["--enforce-eager", "--max-num-seqs", "4"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + seconds
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            try:
                kind_of_server(Http(url, 5))
                break
            except ServingError:
                time.sleep(1)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(60)
