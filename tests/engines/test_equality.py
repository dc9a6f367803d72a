"""The check at the first use of a configuration: the small model crosses every border that the configuration names, a
fault in decoding or in packed blocks is found there, and what was found is remembered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_import import cache
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from distill.engines.loaded import _decoding_fault
from distill.engines.model import PendingTree
from distill.engines.torch import blocks, equality
from distill.engines.torch.blocks import packing_fault
from distill.engines.torch.equality import LENGTH, require_equal_to_transformers, small_config
from distill.engines.torch.hugging_face import context_length
from distill.engines.torch.model import TorchModel
from distill.errors import DataError

assert cache  # each test has a cache of its own


@pytest.fixture(autouse=True)
def nothing_judged() -> Iterator[None]:
    equality._judged.cache_clear()
    yield
    equality._judged.cache_clear()


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3_text": {},  # windows
    "phi3": {
        "original_max_position_embeddings": 4096,
        "max_position_embeddings": 131072,
        "rope_parameters": LONG | {"rope_theta": 1e4, "original_max_position_embeddings": 4096},
    },
    "smollm3": {},  # layers without positions
    "llama4_text": {},  # chunks, experts
    "mixtral": {},
}


def model_of(kind: str, **values: Any) -> Any:
    """What the check reads of a model: its configuration."""
    config = CONFIG_MAPPING[kind](**(CONFIGS.get(kind, {}) | values))
    config._attn_implementation = "sdpa"
    return SimpleNamespace(config=config)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", CONFIGS)
def test_decoding_and_blocks_are_transformers_own(kind: str, cache: Path) -> None:
    """And the borders are inside the text that is compared, as large as the real ones are."""
    model = model_of(kind)
    small = small_config(model.config)
    windows = [getattr(small, key, None) for key in ("sliding_window", "attention_chunk_size")]
    assert all(border < LENGTH / 3 for border in windows if border)
    assert set(getattr(small, "layer_types", None) or ()) == set(getattr(model.config, "layer_types", None) or ())
    assert require_equal_to_transformers(model, "decoding", _decoding_fault)
    assert require_equal_to_transformers(model, "a packed block", packing_fault)
    kept = [json.loads(path.read_text()) for path in (cache / "weights").glob("equal-*.json")]
    assert kept == [{"fault": ""}, {"fault": ""}]


def test_a_text_ends_where_its_rotary_embedding_changes(capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond the border the tokens before it have other keys: there a cache gives another model."""
    config = model_of("phi3").config
    assert context_length(config) == 4096
    config._name_or_path = "a folder"
    assert (
        context_length(
            model_of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}).config
        )
        == 2048
    )
    nested = {"full_attention": LONG | {"original_max_position_embeddings": 64.0, "rope_theta": 1e4}}
    stand_in = SimpleNamespace(max_position_embeddings=256, rope_parameters=nested, model_type="x")
    stand_in.get_text_config = lambda: stand_in
    assert context_length(stand_in) == 64
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(small_config(config)).eval()
    border = context_length(model.config)
    assert border == 24 and TorchModel(model).capacity == border and capsys.readouterr().err == ""
    ids = torch.arange(border + 6)[None] % 90
    with torch.inference_mode():
        before = model(ids[:, :border]).logits[0, 5]
        assert torch.allclose(before, model(ids[:, :20]).logits[0, 5], atol=1e-5)
        assert not torch.allclose(before, model(ids).logits[0, 5], atol=1e-3)


def test_a_fault_is_named_and_remembered(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    def twisted(model: Any) -> str:
        return "with a growing cache, from token 9 on (by 0.3 of the logits' spread)"

    with pytest.raises(DataError, match="decoding of a qwen2 with these settings differs from transformers' own"):
        require_equal_to_transformers(model_of("qwen2"), "decoding", twisted)
    equality._judged.cache_clear()
    with pytest.raises(DataError, match="from token 9 on"):  # which a later process reads
        require_equal_to_transformers(model_of("qwen2"), "decoding", lambda model: "")


def _all_seen(self: PendingTree, first: int, width: int) -> list[list[int]]:
    return [[int(node <= own) for node in range(width)] for own in range(first, len(self))]


@pytest.mark.parametrize(
    ("place", "fault", "words"),
    [
        ("torch.model.in_window", lambda *_: True, "in trees, from"),
        ("model.PendingTree.seen", _all_seen, "with a growing cache, in trees, from token 5"),
        ("model.PendingTree.only_path", lambda *_: [0, 1, 2, 3], "in trees, from token 8"),
    ],
)
def test_a_fault_in_decoding_is_found(
    monkeypatch: pytest.MonkeyPatch, cache: Path, place: str, fault: Any, words: str
) -> None:
    """A window that our masks leave out, branches that see each other, another path than the one that was committed."""
    monkeypatch.setattr(f"distill.engines.{place}", fault)
    with pytest.raises(DataError, match=f"differs from transformers' own forward pass .*{words}"):
        require_equal_to_transformers(model_of("gemma3_text"), "decoding", _decoding_fault)


@pytest.mark.parametrize(
    ("name", "words"), [("attention_mask", "document 2 of block 1"), ("packed_inputs", "document 2 of block 2")]
)
def test_a_fault_in_blocks_is_found(monkeypatch: pytest.MonkeyPatch, cache: Path, name: str, words: str) -> None:
    """Documents that see each other; and a document that sees the rest of another in a block after the first."""
    inner = blocks.packed_inputs

    def merged(model: Any, packed: Any) -> Any:
        documents = packed.documents.clone()
        documents[1:][documents[1:] == 1] = 0
        return inner(model, replace(packed, documents=documents))

    def causal(documents: torch.Tensor) -> torch.Tensor:
        width = documents.shape[1]
        return torch.ones(len(documents), 1, width, width, dtype=torch.bool).tril()

    monkeypatch.setattr(blocks, name, causal if name == "attention_mask" else merged)
    monkeypatch.setattr(blocks, "masked_below", lambda _: 2**20)
    with pytest.raises(DataError, match=f"a packed block .* differs .* in {words}"):
        require_equal_to_transformers(model_of("qwen2"), "a packed block", packing_fault)
