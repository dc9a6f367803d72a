"""Chat templates in the styles of five families, written for the tests, each with and without generation marks."""

from __future__ import annotations

from typing import Any

LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{% if m['role'] == 'assistant' %}{G}{{ m['content'] }}<|eot_id|>{E}"
    "{% else %}{{ m['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% set first = namespace(system='') %}{% for m in messages %}{% if m['role'] == 'system' %}"
    "{% set first.system = m['content'] + '\n\n' %}{% elif m['role'] == 'user' %}"
    "[INST] {{ first.system }}{{ m['content'] }}[/INST]{% set first.system = '' %}"
    "{% else %}{G}{{ m['content'] }}</s>{E}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{G}{{ m['content'] }}<end_of_turn>{E}{{ '\\n' }}"
    "{% else %}{{ m['content'] }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# Drops the thinking of earlier turns, and begins that of the next one.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' %}{{ m['content'] }}"
    "{% elif m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% else %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}<|end_of_sentence|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
# Drops the thinking before the last question, offers tools, and closes an empty thinking where it is switched off.
QWEN_3 = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.index0 > last.at and m['reasoning_content'] %}<think>\n{{ m['reasoning_content'] }}"
    "{{ '\\n</think>\\n\\n' }}{% endif %}"
    "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}{{ '\\n' }}<tool_call>\n{{ call | tojson }}"
    "{{ '\\n' }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% else %}<|im_start|>{{ 'user' if m['role'] == 'tool' else m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# As gpt-oss reads it: `thinking`, channels, and an end of its own behind a call. Written for this test.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %}"
    "{% if m.tool_calls %}<|channel|>commentary to={{ m.tool_calls[0].function.name }}<|message|>"
    "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% else %}<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
# As DeepSeek's joins it: arguments that are text; no line break around the closed thinking.
JOINED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|></think>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<call>' + call.function.name + ' ' + call.function.arguments }}"
    "{% endfor %}"
    "<|end_of_sentence|>{% else %}<|User|>{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|>{{ '<think>' if thinking else '</think>' }}{% endif %}"
)
# Reads a list of parts, as those of models that see images do.
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Reads the first system message alone, as gpt-oss's does.
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Command R's: several by name, of which one alone reads documents, and no server takes that one by itself.
NAMED = {
    "default": PARTS,
    "tool_use": "{% for t in tools %}{{ t | tojson }}{% endfor %}" + PARTS,
    "rag": "{% for d in documents %}{{ d.text }}{% endfor %}" + PARTS,
}
CHANNEL_MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
STYLES: dict[str, tuple[Any, list[str], str]] = {  # the template, special tokens, and the one that ends a turn
    "llama-3": (
        LLAMA_3,
        ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>",
    ),
    "mistral": (MISTRAL, ["<s>", "</s>", "[INST]", "[/INST]"], "</s>"),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"], "<end_of_turn>"),
    "r1": (R1, ["<|begin|>", "<|User|>", "<|Assistant|>", "<|end_of_sentence|>"], "<|end_of_sentence|>"),
    "qwen-3": (QWEN_3, CHATML, "<|im_end|>"),
}
FURTHER: dict[str, tuple[Any, list[str], str]] = {
    "channels": (CHANNELS, CHANNEL_MARKS, "<|return|>"),
    "joined": (JOINED, ["<|User|>", "<|Assistant|>", "<|end_of_sentence|>"], "<|end_of_sentence|>"),
    "parts": (PARTS, CHATML, "<|im_end|>"),
    "first system": (FIRST_SYSTEM, CHATML, "<|im_end|>"),
    "named": (NAMED, CHATML, "<|im_end|>"),
}


def dress(tokenizer: Any, style: str, marked: bool = False) -> Any:
    """Give a byte-level tokenizer the special tokens and the template of a style."""
    template, special, end = (STYLES | FURTHER)[style]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    if style in FURTHER:
        tokenizer.eos_token, tokenizer.chat_template = end, template
        return tokenizer
    tokenizer.bos_token, tokenizer.eos_token = special[0], "<eos>" if style == "gemma" else end
    begin, close = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    tokenizer.chat_template = template.replace("{G}", begin).replace("{E}", close)
    return tokenizer


# Where answers begin behind other texts than a line's end; the last part of a turn is not always a special token.
TURNS = {  # what stands before a user's message, between it and the answer, and behind the answer
    "colon": ("User: ", "\n\nAssistant: ", "{{ eos_token }}"),
    "no space": ("<s>[INST] ", " [/INST]", "{{ eos_token }}"),
    "lines": ("### Question\n", "\n### Answer\n", "<end>\n"),
    "space": ("USER: ", " ASSISTANT: ", "<end>"),
    "tokens": ("<tool>user\n", "<end>\n<tool>assistant\n", "<end>\n"),
    "bare": ("<tool>", "<end>", "<end>"),
}


def with_turns(tokenizer: Any, style: str, trim: bool) -> Any:
    """Give a tokenizer the template of TURNS, in which the prompt ends without the space before an answer."""
    user, between, end = TURNS[style]
    begun = between.rstrip(" ") if style != "space" else between
    content = "m['content'] | trim" if trim else "m['content']"
    tokenizer.chat_template = (
        f"{{{{ bos_token }}}}{{% for m in messages %}}{{% if m['role'] == 'user' %}}{user}{{{{ m['content'] }}}}"
        f"{{% else %}}{between}{{{{ {content} }}}}{end}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{begun}{{% endif %}}"
    )
    return tokenizer


def fault_of_answer(template: Any, messages: list[dict[str, Any]], ended: bool = True) -> str | None:
    """How the ids of an answer differ from those of the whole rendered chat; None where they do not.

    Where a token of the whole chat reaches over the end of the prompt, which a server reads on its own, the text is the
    same, and so are the ids from the next border of both on.
    """
    from distill.data.samples import decoded
    from distill.engines.torch.hugging_face import encode_text

    tokenizer = template.tokenizer
    prompt, answer = template.answered(messages, ended=ended)
    if prompt != encode_text(tokenizer, template.text(messages[:-1])):
        return "the prompt has other ids than alone"
    whole, found = encode_text(tokenizer, template.text(messages, generate=False)), prompt + answer
    if ended and answer[-1:] != template.end:
        return "it does not end"
    if whole[: len(prompt)] == prompt:
        same, rest = found == whole[: len(found)], decoded(tokenizer, whole[len(found) :])
    else:
        text = decoded(tokenizer, whole)
        same, rest = text.startswith(decoded(tokenizer, found)), text.removeprefix(decoded(tokenizer, found))
    wanted = not rest.strip() if ended else rest.startswith(decoded(tokenizer, template.end))
    return None if same and wanted else f"{answer} behind {prompt} is not {whole}; {rest!r} follows"
