"""How does a chat become a prompt, and an answer a message? As transformers' own server has it.

Messages, chat templates, tools and response templates are read by `transformers.cli.serving`; what it does not have
(n, log probabilities, a seed of each answer, stops that are not shown) is here.
"""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any

from transformers.cli.serving.chat_completion import ChatCompletionHandler
from transformers.cli.serving.utils import Modality, build_response_parser, get_response_template

from .answer import Choice, Step
from .errors import invalid
from .messages import Facts
from .pieces import ParsedPieces, PlainPieces, ReasoningText, ToolCall

# transformers 5.17 knows no tools when it reads an answer.
_TAKES_TOOLS = "tools" in inspect.signature(build_response_parser).parameters
_ROLES = {"system", "developer", "user", "assistant", "tool", "function"}


class Chat:
    """`/v1/chat/completions`. tokenizer: makes ids of text; writing: another one, which makes text of ids."""

    fields = frozenset({"messages", "max_completion_tokens", "tools", "tool_choice", "top_logprobs",
                        "chat_template_kwargs"})  # fmt: skip
    word, chunk_word, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, facts: Facts, tokenizer: Any, writing: Any) -> None:
        self.tokenizer, self.writing = tokenizer, writing
        # All that transformers' server looks at where a model's response template is looked for.
        self.model = SimpleNamespace(config=SimpleNamespace(model_type=facts.model_type))

    def prompts(self, body: dict[str, Any]) -> list[list[int]]:
        """The ids of the one prompt that a chat is. ApiError 400 for messages that are none."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise invalid("messages", "the model has no chat template: send a prompt (/v1/completions) instead, or "
                                      "give --chat-template", "no_chat_template")
        messages = body.get("messages")
        _check_messages(messages)
        tools, kwargs = body.get("tools"), body.get("chat_template_kwargs") or {}
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise invalid("tools", "tools must be a list of objects")
        if not isinstance(kwargs, dict):
            raise invalid("chat_template_kwargs", "chat_template_kwargs must be an object")
        try:
            read = ChatCompletionHandler.get_processor_inputs_from_messages(messages, Modality.LLM)
            ids = self.tokenizer.apply_chat_template(read, add_generation_prompt=True, tools=tools or None,
                                                     return_dict=True, tokenize=True, **kwargs)["input_ids"]
        except Exception as error:  # of a template, which may raise anything, or of a part without its fields
            raise invalid("messages", f"the messages cannot be read: {type(error).__name__}: {error}") from error
        return [ids]

    def pieces(self, body: dict[str, Any], prompt: list[int], stops: list[str]) -> PlainPieces | ParsedPieces:
        """What shows an answer to this prompt."""
        options = {"tools": body["tools"]} if body.get("tools") and _TAKES_TOOLS else {}
        parser = build_response_parser(self.tokenizer, self.model, self._read_before(prompt), **options)
        if parser is None:
            return PlainPieces(stops, self.writing)
        return ParsedPieces(stops, self.writing._tokenizer, parser)

    def _read_before(self, prompt: list[int]) -> list[int]:
        """The prompt, if it opens an answer as the response template knows it: of another one a parser would take
        all for a part of the answer."""
        template = get_response_template(self.tokenizer, self.model) or {}
        anchors = template.get("start_anchor") or []
        text = self.tokenizer.decode(prompt)
        return prompt if any(one in text for one in ([anchors] if isinstance(anchors, str) else anchors)) else []

    def opening(self, choice: Choice) -> dict[str, Any]:
        """The first chunk of an answer."""
        return {"delta": {"role": "assistant", "content": ""}}

    def empty(self) -> dict[str, Any]:
        """A chunk without text."""
        return {"delta": {}}

    def deltas(self, step: Step, told: Message) -> list[dict[str, Any]]:
        """What a step adds to a stream."""
        return [{"delta": told.add(piece)} for piece in step.shown]

    def told(self, index: int, answer_id: str) -> Message:
        """An empty answer."""
        return Message(f"{answer_id}-{index}")

    def logprobs(self, entries: list[Any], words: Any) -> dict[str, Any]:
        """In the shape of a chat's answer."""
        return {"content": [words.chat_entry(entry) for entry in entries], "refusal": None}


class Message:
    """An answer as its pieces come: what a message of the assistant holds."""

    def __init__(self, name: str) -> None:
        self.name, self.content, self.reasoning = name, "", ""
        self.calls: list[dict[str, Any]] = []

    def add(self, piece: Any) -> dict[str, Any]:
        """The delta of a piece."""
        if isinstance(piece, ToolCall):
            call = {"id": f"call-{self.name}-{len(self.calls)}", "type": "function",
                    "function": {"name": piece.name, "arguments": piece.arguments}}  # fmt: skip
            self.calls.append(call)
            return {"tool_calls": [{"index": len(self.calls) - 1, **call}]}
        if isinstance(piece, ReasoningText):
            self.reasoning += piece
            return {"reasoning_content": str(piece)}
        self.content += piece
        return {"content": piece}

    def ended(self, reason: str) -> str:
        """The reason, in the words of a chat."""
        return "tool_calls" if self.calls and reason == "stop" else reason

    def whole(self) -> dict[str, Any]:
        """The message of an answer that was not streamed."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return {"message": message}


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "messages must be a list with at least one message")
    for place, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in tuple(_ROLES):  # it may be a list
            raise invalid(f"messages[{place}]", f"messages[{place}] must be an object with a role, one of "
                                                f"{', '.join(sorted(_ROLES))}")
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None):
            raise invalid(f"messages[{place}].content", "a content must be a text or a list of parts")
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise invalid(f"messages[{place}].content", "a part of a content must be a text; images and sound "
                                                            "cannot be read")
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list):
            raise invalid(f"messages[{place}].tool_calls", "tool_calls must be a list")
        for call in calls:
            try:
                json.loads(call["function"]["arguments"])
            except (KeyError, TypeError, ValueError):
                raise invalid(f"messages[{place}].tool_calls", "a tool call needs a function with arguments, a text "
                                                               "of JSON") from None
