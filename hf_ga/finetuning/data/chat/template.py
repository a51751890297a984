"""The chat template of a tokenizer, with the tools and the options of one row."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

Message = dict[str, Any]
Span = tuple[int, int]  # characters [start, end)
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """Renders the messages of one row.

    Args:
        tokenizer: With a chat template.
        tools: JSON schemas of functions, for `apply_chat_template`.
        options: Other variables of the template.
    """

    tokenizer: PreTrainedTokenizerBase
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]

    @cached_property
    def source(self) -> str:
        """The template in Jinja."""
        return self.tokenizer.get_chat_template(tools=self.tools)

    @property
    def marks_generations(self) -> bool:
        """Whether the template marks what the model generates, with `{% generation %}`."""
        return GENERATION_TAG.search(self.source) is not None

    def render(self, messages: list[Message], *, opens_turn: bool = False) -> str:
        """Render messages.

        Args:
            messages: At least one.
            opens_turn: Add the generation prompt, with which a turn of the assistant begins.
        """
        return self.tokenizer.apply_chat_template(
            messages,
            tools=self.tools,
            tokenize=False,
            add_generation_prompt=opens_turn,
            **self.options,
        )

    def generation_prompt(self, messages: list[Message], opened: str) -> str | None:
        """What the template adds to messages to begin a turn of the assistant.

        Args:
            messages: At least one.
            opened: `render(messages, opens_turn=True)`.

        Returns:
            The end of `opened`. None: it cannot be told apart.
        """
        closed = self.render(messages)
        # Some templates end a conversation with the end-of-text token, but not before a turn.
        for text in (closed, closed.removesuffix(self.tokenizer.eos_token or "")):
            if opened.startswith(text):
                return opened.removeprefix(text)
        return None

    def generations(self, messages: list[Message]) -> list[Span]:
        """The parts of `render(messages)` that the template marks with `{% generation %}`."""
        _, spans = render_jinja_template(
            conversations=[messages],
            tools=self.tools,
            chat_template=self.source,
            return_assistant_tokens_mask=True,
            **{**self.tokenizer.special_tokens_map, **self.options},
        )
        return [(start, end) for start, end in spans[0]]
