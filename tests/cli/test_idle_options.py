"""Every option of every form of a command is read there or refused by its name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import tiny
import typer.main

from distill.cli.app import app

Capture = pytest.CaptureFixture[str]
DECODED = "top_k top_p min_p repetition_penalty seed verifier drafter widths rule p_min allow_lossy chat stop regex"
DECODED += " json_schema grammar static compile threads gguf tokens temperature length"
COUNTED = "n_max temperature top_k top_p min_p draft_sampling count tokens concurrency load repeats reply_seconds to"
COUNTED += " threads output"
PAIR = "target draft prompts count prompt_tokens tokens lengths configuration temperature top_k top_p min_p static"
PAIR += " compile prepack seed to threads output gguf allow_lossy table"

VALUES = {"output": "csv", "dtype": "float32", "kind": "vllm", "draft_sampling": "greedy", "flash_attn": "on"}
VALUES |= dict.fromkeys(("must_pay", "temperature", "top_p", "min_p", "p_min"), "0.5")
VALUES |= dict.fromkeys(("cache_type_k", "cache_type_v"), "bf16")
# A form of a command, and the parameters that it reads or that make another form of it. Nothing that they name exists.
FORMS = [
    ("train r.yaml --rehearse", "runs"),
    ("train r.yaml --dry-run", "runs until redo fresh refresh rehearsal"),
    ("train r.yaml --refresh", "runs until rehearsal"),
    ("train r.yaml --fresh", "runs until dry_run must_pay refresh rehearsal"),
    (
        "eval none",
        "kl acceptance outtype target_outtype cache_type threads runs output target draft",
    ),
    (
        "eval --target a --draft b --text c",
        "kl acceptance outtype target_outtype cache_type temperature prompts threads output gguf",
    ),
    ("profile a.gguf", "depths max_tokens repeats threads out output gguf"),
    ("profile a", "depths max_tokens repeats threads out output dtype static compile prepack gguf"),
    ("speedup none", "allow_lossy threads runs output gguf target draft prompts"),
    ("speedup none --prompts p.txt", f"{PAIR} runs drafter verifier dtype draft_device draft_weights"),
    ("speedup --target a --draft b --prompts p.txt", f"{PAIR} drafter verifier dtype draft_device draft_weights"),
    ("speedup --target a --prompts p.txt --lengths 0", f"{PAIR} dtype draft_device draft_weights"),
    ("speedup --target a.gguf --prompts p.txt --drafter lookup",
     "target draft prompts count prompt_tokens tokens lengths configuration temperature top_k top_p min_p drafter seed"
     " verifier to threads output gguf allow_lossy static compile prepack"),
    ("generate x --run none", f"{DECODED} runs target draft draft_device draft_weights"),
    ("generate x --target a --draft b", f"{DECODED} run draft_device draft_weights"),
    ("generate x --target a --drafter lookup", f"{DECODED} run"),
    ("serve-check none --server s", f"{COUNTED} p_min choose outtype start_seconds target draft prompts url runs gguf"),
    ("serve-check none --url u", f"{COUNTED} outtype target draft prompts plain_url kind key model server runs gguf"),
    ("serve-check --server s --target a.gguf --draft b.gguf --prompts p",
     f"{COUNTED} p_min choose start_seconds prompt_tokens url gguf"),
    ("check r.yaml", "offline target draft"),
    ("check --target a --draft b", "offline"),
    ("cut a out --mlp-width 64", "text target layers drop_layers"),
    ("cut a out --drop-layers 1", "text target layers mlp_width layer_repair"),
    ("export-gguf FOLDER --no-check --outtype q4_k_m", "folder tensor_type imatrix target overwrite"),
    ("export-gguf FOLDER", "outtype folder tensor_type check text target overwrite"),
    ("runs --delete none", "runs yes"),
    ("runs", "runs output delete"),
    ("report none", "runs"),
]  # fmt: skip


def options_of(command: str) -> list[Any]:
    commands: Any = typer.main.get_command(app)
    return [one for one in commands.commands[command].params if one.opts[0].startswith("-") and one.name != "help"]


def given(option: Any) -> list[str]:
    """The option as a command line gives it, with a value that it takes."""
    name = str(option.name).removeprefix("gguf_target_").removeprefix("gguf_draft_")
    return [option.opts[0]] if option.is_flag else [option.opts[0], VALUES.get(name, "9")]


@pytest.mark.parametrize(("form", "read"), FORMS, ids=[form for form, _ in FORMS])
def test_what_a_form_does_not_read_it_refuses(form: str, read: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text("{}")
    arguments = [str(tmp_path) if part == "FOLDER" else part for part in shlex.split(form)]
    left = [
        option
        for option in options_of(arguments[0])
        if option.name not in read.split()
        and not {*option.opts, *option.secondary_opts} & {*arguments}
        and not ("gguf" in read.split() and str(option.name).startswith("gguf_"))
    ]
    for option in left:
        said = tiny.refused(capsys, *arguments, *given(option))
        of_engine = str(option.name).startswith("gguf_") and "llama.cpp" in said
        assert said.startswith(f"distill: {option.opts[0]}") or of_engine, (form, option.name, said)
