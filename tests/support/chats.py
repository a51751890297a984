"""Small chat templates, each with one habit of those of well-known models, and what rows become
with them.
"""

from hf_ga.finetuning.data.chat.rendering import render_rows
from hf_ga.finetuning.data.encoding.tokenization import tokenize_causal
from hf_ga.finetuning.data.formats import corpus

IGNORED = -100
SPECIAL = ["<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "</s>", "<|user|>", "<|assistant|>"]
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
HEADER = "<|im_start|>{{ m.role }}\n"
CHATML = f"{{% for m in messages %}}{HEADER}{{{{ m.content }}}}<|im_end|>\n{{% endfor %}}{OPEN}"
# The number of the last message of the user, as Qwen's templates find it.
LAST = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
CALLS = (
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }}</call>{% endfor %}"
)
# Renders tools and calls; arguments must be a dict.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    f"{{% for m in messages %}}{HEADER}{{{{ m.content }}}}{CALLS}<|im_end|>\n{{% endfor %}}{OPEN}"
)
# The same with arguments as JSON, and a content that must be there.
TOOLS_OF_JSON = TOOLS.replace("{{ m.content }}", "{{ '' + m.content }}").replace(
    "{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"
)
# Thoughts of turns after the last message of the user only; there, an empty thought if there is
# none.
THINKING = (
    f"{LAST}{{% for m in messages %}}{HEADER}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    f"{{{{ m.content.split('</think>')[-1].lstrip() if m.content else '' }}}}{CALLS}<|im_end|>\n"
    f"{{% endfor %}}{OPEN}"
)
# All that a row may have.
WHOLE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% set enable_thinking = enable_thinking is not defined or enable_thinking %}"
    + THINKING.replace("loop.index0 > ns.last", "enable_thinking and loop.index0 > ns.last")
)
# The generation prompt opens a thought, and all turns lose theirs.
THOUGHTLESS = (
    "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|assistant|>"
    "{{ m.content.split('</think>')[-1] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
# A turn ends where the next begins: without an end of its own.
ENDLESS = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# The last turn ends otherwise: with the end of text.
OTHER_END = CHATML.replace(
    OPEN,
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}",
)
# Marks what the model generates; there is no generation prompt.
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n"
    f"{{% else %}}{HEADER}{{{{ m.content }}}}<|im_end|>\n{{% endif %}}{{% endfor %}}"
)


def tokenizer_with(template: str | None, num_tokens: int = 280):
    """A tokenizer of at least all bytes, with this template and the special tokens of all."""
    tokenizer = corpus.train_tokenizer(["some words to train on"], num_tokens)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template
    return tokenizer


def said(role: str, content: str | None, **more) -> dict:
    """A message."""
    return {"role": role, "content": content, **more}


def turns(*contents: str) -> list[dict]:
    """Messages of user and assistant in turn."""
    return [said(("user", "assistant")[i % 2], content) for i, content in enumerate(contents)]


def targets_of(row: dict, template: str | None) -> list[str]:
    """The parts of a row's text that are targets, each turn's apart."""
    (found,) = render_rows({name: [value] for name, value in row.items()}, tokenizer_with(template))
    return [found.text[start:end] for start, end in found.targets]


def text_of(row: dict, template: str | None) -> str:
    """A row as the template renders it."""
    (found,) = render_rows({name: [value] for name, value in row.items()}, tokenizer_with(template))
    return found.text


def learnt(row: dict, template: str | None) -> str:
    """The tokens of a row that are targets, as text."""
    tokenizer = tokenizer_with(template)
    columns = {name: [value] for name, value in row.items()}
    labels = tokenize_causal(columns, tokenizer, 512)["labels"][0]
    return tokenizer.decode([label for label in labels if label != IGNORED])
