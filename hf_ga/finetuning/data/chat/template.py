"""The chat template of a tokenizer, with the tools and the options of one row."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, end) of a text
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """Renders the messages of one conversation with a tokenizer's chat template.

    Args:
        tokenizer: A tokenizer with a chat template.
        tools: JSON schemas of the functions that the model may call. None: the row has none.
        options: Other variables of the template, such as `enable_thinking`.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]

    @cached_property
    def source(self) -> str:
        """The Jinja source of the tokenizer's chat template (of its variant for tools if the row
        has tools).
        """
        return self.tokenizer.get_chat_template(tools=self.tools)

    @property
    def marks_generations(self) -> bool:
        """Whether the chat template marks what the model generates with `{% generation %}`."""
        return GENERATION_TAG.search(self.source) is not None

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        """Render messages as text, with the tools and options of the conversation.

        Args:
            messages: At least one.
            add_generation_prompt: Whether to append the generation prompt, the text with which a
                turn of the assistant begins.
        """
        return self.tokenizer.apply_chat_template(
            messages,
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self.options,
        )

    def generation_prompt(self, messages: list[Message], text_with_prompt: str) -> str | None:
        """Return the generation prompt that the chat template appends to messages, such as
        `<|im_start|>assistant` with a line break.

        Args:
            messages: At least one.
            text_with_prompt: `render(messages, add_generation_prompt=True)`.

        Returns:
            What follows the rendered messages in `text_with_prompt`, or None if it does not begin
            with them.
        """
        text = self.render(messages)
        # Some templates end a conversation with the end-of-text token, but not before a turn.
        without_eos = text.removesuffix(self.tokenizer.eos_token or "")
        for rendered_messages in (text, without_eos):
            if text_with_prompt.startswith(rendered_messages):
                return text_with_prompt.removeprefix(rendered_messages)
        return None

    def generations(self, messages: list[Message]) -> list[Span]:
        """Return the characters of `render(messages)` that the template marks as generated with
        `{% generation %}`, in order.
        """
        _, spans = render_jinja_template(
            conversations=[messages],
            tools=self.tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.options},
        )
        return [(start, end) for start, end in spans[0]]
