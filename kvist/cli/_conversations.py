"""The demo's load: multi-turn conversations that share system prompts, as a fleet of assistants sees them."""

from __future__ import annotations

import asyncio
import inspect
import os.path
import queue
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_RULES = """Answer in complete sentences and say only what the documentation says. When a function raises an
exception, name the exception and the condition. When an argument has a default value, state the default value. When the
behaviour depends on the platform or on the version of Python, say which platform and which version. Never invent a
module, a function or an argument. Prefer the simplest function of the standard library that does the job."""

_FILES = f"You are an assistant for people who work with files and paths in Python. {_RULES}"
_TEXT = f"You are an assistant for people who work with text and regular expressions in Python. {_RULES}"
_CONCURRENCY = f"You are an assistant for people who write concurrent programs in Python. {_RULES}"

_MAX_QUOTE_CHARS = 240


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and the few words that stand for it in a table."""

    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and what the user says, turn by turn."""

    system_prompt: str
    turns: tuple[Turn, ...]


def _conversation(system_prompt: str, *functions: Callable[..., Any]) -> Conversation:
    """The user asks about one function after the other, quoting the documentation of each."""
    turns = []
    for function in functions:
        module = getattr(function, "__module__", None)  # methods of built-in types have none
        name = f"{module}.{function.__qualname__}" if module else function.__qualname__
        quote = (inspect.getdoc(function) or "")[:_MAX_QUOTE_CHARS]
        turns.append(Turn(name, f"The documentation of {name} says:\n\n{quote}\n\nWhat does {name} do?"))
    return Conversation(system_prompt, tuple(turns))


CONVERSATIONS = (
    _conversation(_FILES, os.path.join, os.path.abspath, os.walk, os.makedirs, os.path.split),
    _conversation(_TEXT, re.compile, re.findall, re.sub, str.split, str.replace),
    _conversation(_CONCURRENCY, threading.Thread, queue.Queue.get, queue.Queue.put, asyncio.run, asyncio.sleep),
    _conversation(_FILES, shutil.copyfile, shutil.copytree, shutil.rmtree, shutil.move, shutil.which),
    _conversation(_TEXT, str.strip, str.join, str.format, re.escape, re.split),
    _conversation(_CONCURRENCY, asyncio.gather, asyncio.wait_for, asyncio.wait, asyncio.shield, threading.Thread.join),
)
"""Six conversations of five turns over three system prompts."""


class Dialogue:
    """A conversation under way; `messages` holds the answers that were really given."""

    def __init__(self, conversation: Conversation) -> None:
        self.messages = [{"role": "system", "content": conversation.system_prompt}]
        self._turns = list(conversation.turns)

    @property
    def has_turns_left(self) -> bool:
        """Return whether the user has more to say."""
        return bool(self._turns)

    def ask(self) -> Turn:
        """Let the user speak; return what was added to `messages`."""
        turn = self._turns.pop(0)
        self.messages.append({"role": "user", "content": turn.text})
        return turn

    def hear(self, answer: str) -> None:
        """Add the answer."""
        self.messages.append({"role": "assistant", "content": answer})
