"""The demo's load: multi-turn conversations that share system prompts, as a fleet of assistants sees them."""

from __future__ import annotations

from dataclasses import dataclass

_RULES = """Answer in complete sentences and say only what the documentation says. When a function raises an
exception, name the exception and the condition. When an argument has a default value, state the default value. When the
behaviour depends on the platform or on the version of Python, say which platform and which version. Never invent a
module, a function or an argument. Prefer the simplest function of the standard library that does the job. If the
question is about performance, mention the cost of the operation in terms of the size of its input."""

_SYSTEM_PROMPTS = (
    f"You are an assistant for people who work with files and paths in Python. {_RULES} Paths are strings or "
    "path-like objects, and every function that opens a file should be used in a with statement.",
    f"You are an assistant for people who work with text, strings and regular expressions in Python. {_RULES} "
    "Strings are sequences of Unicode code points, and bytes are decoded before they are searched.",
    f"You are an assistant for people who write concurrent programs in Python. {_RULES} Threads, processes and "
    "coroutines are different things, and a lock that is taken must be released.",
)

_QUESTIONS = (
    ("What does os.path.join do?", "What does it return for an absolute path?", "How do I list a directory?"),
    ("What does re.compile return?", "How do I find all matches?", "What does str.split do?"),
    ("What is a threading.Lock?", "How do I run a coroutine?", "What does queue.Queue.get do?"),
    ("How do I copy a file?", "What happens if the file exists?", "What does shutil.rmtree raise?"),
    ("How do I join a list of strings?", "What does str.strip remove?", "How do I format a number?"),
    ("What is a process pool?", "How do I cancel a task?", "What does asyncio.gather return?"),
)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A system prompt and what the user asks, turn by turn."""

    system_prompt: str
    questions: tuple[str, ...]


CONVERSATIONS = tuple(
    Conversation(_SYSTEM_PROMPTS[index % len(_SYSTEM_PROMPTS)], questions) for index, questions in enumerate(_QUESTIONS)
)
"""Six conversations of three turns over three system prompts."""
