"""The commands that serve a pair: their options, and what holds them to the programs they are for.

tests/serving/test_real_server.py and test_real_vllm.py give them to real ones.
"""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest

from distill.engines.server_commands import VLLM, llama_server, pair_arguments, transformers, vllm
from distill.recipe import Gguf, parse_section


def options(**roles: Any) -> Gguf:
    return parse_section(Gguf, roles)


def test_a_pair_is_served_as_a_plain_draft() -> None:
    assert llama_server("t.gguf", "d f.gguf", 4) == (
        "llama-server -m t.gguf -md 'd f.gguf' --spec-type draft-simple --spec-draft-n-max 4"
    )
    assert pair_arguments("t", "d", 3, 0.5)[-2:] == ["--spec-draft-p-min", "0.5"]
    assert pair_arguments("t", None, 3, 0.5) == ["-m", "t"]


@pytest.mark.parametrize(
    ("settings", "more"),
    [
        ({"probabilistic": False}, {}),
        ({"probabilistic": True}, {"draft_sample_method": "probabilistic"}),
        # For another vocabulary vLLM drafts with best tokens alone.
        ({"probabilistic": True, "same_vocabulary": False}, {"use_heterogeneous_vocab": True}),
    ],
)
def test_vllm_gets_options_that_it_has(settings: dict[str, bool], more: dict[str, Any]) -> None:
    """Of vLLM 0.32.0: fields of SpeculativeConfig (vllm/config/speculative.py)."""
    words = shlex.split(vllm("org/target's", "draft", 5, **settings).replace("\\\n", " "))
    assert [word for word in words if word.startswith("--")] == ["--speculative-config"] and VLLM == "0.32.0"
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {"method": "draft_model", "model": "draft", "num_speculative_tokens": 5, **more}


def test_transformers_takes_the_names_that_are_printed() -> None:
    from transformers import GenerationConfig

    config = GenerationConfig()
    for same in (True, False):
        program = transformers("target", "draft", 4, same)
        ast.parse(program)
        assert ("assistant_tokenizer" in program) is not same
        names = [
            line.split(".generation_config.")[1].split(" ")[0] for line in program.splitlines() if "_config." in line
        ]
        assert names and all(hasattr(config, name) for name in names)
