"""The commands that serve a pair: their options, and what holds them to the programs they are for.

tests/serving/test_real_server.py and test_real_vllm.py give them to real ones.
"""

from __future__ import annotations

import ast
import json
import shlex
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from distill.engines.server_commands import VLLM, llama_server, other_sampling, pair_arguments, transformers, vllm
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


SAMPLING = {"temperature": 0.7, "top_k": 20, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("stated", "asked", "words"),
    [
        ({"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1, "eos_token_id": [1]}, {}, None),
        ({"do_sample": True}, {}, None),
        ({"top_k": -1}, {"top_k": 0}, None),
        ({"temperature": 0.6, "top_p": 0.8}, {}, "0.6 (here 0.7), top_p 0.8 (here 1). *sampler.temperature=0.6"),
        ({"top_k": 40, "temperature": 0}, {"temperature": 0}, None),
        ({"repetition_penalty": 1.05}, {"temperature": 0}, "(here 1.1). *answers.repetition_penalty=1.05"),
        (
            {"no_repeat_ngram_size": 0, "bad_words_ids": [[3]]},
            {},
            "*bad_words_ids [[3]] (which recipes do not have). vLLM",
        ),
        ({"temperature": "0.7"}, {}, "temperature '0.7', which is not a number"),
    ],
)
def test_a_target_that_names_another_sampler(
    stated: dict[str, Any], asked: dict[str, float], words: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    found = other_sampling(str(tmp_path), SAMPLING | asked)
    assert found is None if words is None else fnmatchcase(found or "", "*" + words.replace("[", "[[]") + "*")


def test_commands_carry_the_sampler() -> None:
    words = shlex.split(llama_server("t.gguf", "d.gguf", 4, sampling=SAMPLING))
    assert words[-10:] == ["--temp", "0.7", "--top-k", "20", "--top-p", "1", "--min-p", "0", "--repeat-penalty", "1.1"]
    words = shlex.split(vllm("t", "d", 4, sampling=SAMPLING).replace("\\\n", " "))
    assert json.loads(words[words.index("--override-generation-config") + 1]) == SAMPLING
    assert "do_sample=True, temperature=0.7, top_k=20" in transformers("t", "d", 4, True, SAMPLING)
    assert "do_sample=False, repetition_penalty=1.1, max" in transformers(
        "t", "d", 4, True, SAMPLING | {"temperature": 0}
    )


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
