"""What ends a target's texts: tokens that files name, and what the chat template writes after an answer or between
turns, tokens or plain text; a target without any is said once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny
from tiny import Capture, edit, needs_llama
from transformers import PreTrainedTokenizerFast

from distill.engines.ends import target_ends
from distill.engines.torch.hugging_face import load_tokenizer, turn_ends
from distill.gguf.writer import export_gguf

START = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
TEMPLATES = {
    "token": (START + "<|im_end|>\n{% endfor %}", "<|im_end|>", ""),
    "text": ("{% for m in messages %}{{ m.role }}: {{ m.content }} [over]\n{% endfor %}", "", " [over]"),
    "token between turns": (START + "{% if not loop.last %}<|im_end|>\n{% endif %}{% endfor %}", "<|im_end|>", ""),
    "text between turns": ("{% for m in messages %}\n### {{ m.role }}:\n{{ m.content }}{% endfor %}", "", "### user:"),
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
    ids = [tokenizer.convert_tokens_to_ids(token)] if token else []
    assert turn_ends(tokenizer) == (ids, text)
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
def test_a_file_without_an_end_token(world: Path, tmp_path: Path, capsys: Capture) -> None:
    """The key of the end token holds no id, and the template ends turns: the same ends for every command."""
    whole = export_gguf(world / "target", tmp_path / "whole.gguf", "f32").path
    content = whole.read_bytes()
    key = b"tokenizer.ggml.eos_token_id"
    place = content.index(key) + len(key) + 4
    path = tmp_path / "m.gguf"
    path.write_bytes(content[:place] + (2**32 - 1).to_bytes(4, "little") + content[place + 4 :])
    assert tiny.call("check", path, whole) == 0
    printed = capsys.readouterr().out
    assert "the target's texts end at <|" in printed
