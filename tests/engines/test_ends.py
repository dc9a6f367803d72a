"""What ends a target's texts: tokens that files name, and what the chat template writes after an answer or between
turns, tokens or plain text; a target without any is said once."""

from __future__ import annotations

import re
import shutil
from collections import deque
from pathlib import Path

import pytest
import tiny
from tiny import Capture, edit, needs_llama
from transformers import PreTrainedTokenizerFast
from writing_worlds import begin

from distill.data.samples import Request
from distill.decoding.rules import rules_of_pair
from distill.engines.ends import target_ends, turn_end
from distill.engines.loaded import load_pair
from distill.engines.torch.hugging_face import load_tokenizer
from distill.gguf.head import END_NAMES
from distill.gguf.writer import export_gguf
from distill.measuring.evaluation import write_texts
from distill.recipe import Target
from distill.teacher.writers import TorchWriter

START = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
TEMPLATES = {
    "token": (START + "<|im_end|>\n{% endfor %}", "<|im_end|>", ""),
    "text": ("{% for m in messages %}{{ m.role }}: {{ m.content }} [over]\n{% endfor %}", "", " [over]"),
    "token between turns": (START + "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}", "<|im_end|>", ""),
    "text between turns": ("{% for m in messages %}\n### {{ m.role }}:\n{{ m.content }}{% endfor %}", "", "### user:"),
    "a beginning between turns": ("{% for m in messages %}<|im_start|>{{ m.content }}\n{% endfor %}", "", ""),
    "nothing": ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "", ""),
    "a letter": ("{% for m in messages %}{{ m.content }}.{% endfor %}", "", ""),
    "refuses": ("{{ raise_exception('no') }}", "", ""),
}


@pytest.fixture
def folder(world: Path, tmp_path: Path) -> Path:
    """A copy of the world's target whose tokenizer has <|im_end|> and names no end."""
    place = Path(shutil.copytree(world / "target", tmp_path / "model"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(place)
    assert "<|im_end|>" in tokenizer.get_vocab()
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        if (place / name).is_file():
            edit(place / name, eos_token_id=None, eos_token=None)
    (place / "special_tokens_map.json").unlink(missing_ok=True)
    return place


@pytest.mark.parametrize("name", TEMPLATES)
def test_ends_of_templates(name: str, folder: Path, capsys: Capture) -> None:
    template, token, text = TEMPLATES[name]
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(str(folder))
    tokenizer.bos_token = "<|im_start|>"  # begins a turn, and ends none
    ids = [tokenizer.convert_tokens_to_ids(token)] if token else []
    assert turn_end(tokenizer) == (ids, text)
    found = target_ends(str(folder), tokenizer)
    assert (found.ids, found.texts) == (ids, (text,) if text else ())
    said = capsys.readouterr().err
    expected = (
        "which none of its files names" if token else f"ends a turn with the text {text!r}" if text else "names nothing"
    )
    assert expected in said
    target_ends(str(folder), tokenizer)
    assert capsys.readouterr().err == "", "once"


def test_a_named_end_stays(folder: Path, capsys: Capture) -> None:
    (folder / "chat_template.jinja").write_text(TEMPLATES["text"][0])
    edit(folder / "config.json", eos_token_id=[2, 5])
    found = target_ends(str(folder))
    assert found.ids == [2, 5] and found.texts == (" [over]",) and "the text ' [over]'" in found.words
    assert "names nothing" not in capsys.readouterr().err


@needs_llama
@pytest.mark.parametrize("form", ["token", "text"])
def test_a_file_without_an_end_token(form: str, world: Path, tmp_path: Path, capsys: Capture) -> None:
    """The key of the end token holds no id: the template's own end counts, though no import knows an end token."""
    folder = Path(shutil.copytree(world / "target", tmp_path / "model"))
    template, token, text = TEMPLATES[form]
    (folder / "chat_template.jinja").write_text(template)
    whole = export_gguf(folder, tmp_path / "whole.gguf", "f32").path
    content = whole.read_bytes()
    key = b"tokenizer.ggml.eos_token_id"
    place = content.index(key) + len(key) + 4
    content = content[:place] + (2**32 - 1).to_bytes(4, "little") + content[place + 4 :]
    for name in load_tokenizer(str(folder)).get_vocab().keys() & END_NAMES - {token}:
        content = content.replace(name.encode(), b"x" * len(name.encode()))
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    assert tiny.call("check", path, path) == 0
    printed = capsys.readouterr().out
    assert f"the target's texts end at {token or f'the text {text!r}'}\n" in printed
    with load_pair(Target(model=str(path)), tokens=64) as pair:
        assert pair.text_ends == ((text,) if text else ()) and (pair.text([*pair.ends]) == "") == bool(text or token)


def test_every_command_ends_before_a_text(folder: Path, world: Path, tmp_path: Path, capsys: Capture) -> None:
    """What the model writes by itself is made its end of a turn: evaluation, answers and `generate` end there."""
    asked, target = "def alpha(beta):", Target(model=str(folder), dtype="float32")

    def written() -> tuple[list[int], list[int], str]:
        with load_pair(target) as pair:
            prompt = pair.encode(asked)
            (ids,) = write_texts(pair.target, [prompt], 40, rules_of_pair(pair))
            return prompt, ids, pair.text(ids)

    free = written()[2]
    found = re.search(r"[a-z]{3,}", free[12:])
    assert found is not None
    place = free.index(found[0])
    content = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + found[0] + "\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(content)
    prompt, ids, text = written()
    assert free[:place].startswith(text) and len(text) > place - 12
    recipe, _ = begin(world, tmp_path / "run", 1, f"target.model={folder}", "sampler.temperature=0")
    writer = TorchWriter(recipe, load_tokenizer(str(folder)))
    (reply,) = writer.write(deque([Request("r", prompt, 0, 40)]))
    writer.close()
    assert reply.ids == ids and reply.ended
    capsys.readouterr()
    assert tiny.call("generate", asked, folder, "--no-chat", "--tokens", 40, "-C", "drafter=none") == 0
    assert capsys.readouterr().out == f"{asked}{free[:place]}\n"
