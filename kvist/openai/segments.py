"""Where a prompt's text may be cut so that tokenising the pieces gives the tokens of the whole.

A tokeniser takes its special tokens out of the text before anything else and encodes what lies between them piece by
piece, each for itself. So a cut right before a special token changes nothing, if that token is matched there for
certain: no other added token contains it, overlaps its start, or eats the space around it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer


def cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Return a pattern that matches right before each safe special token; None when the model has none."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    safe = [token.content for token in added if _is_safe(token, (other.content for other in added))]
    if not safe:
        return None
    return re.compile("(?=" + "|".join(re.escape(content) for content in safe) + ")")


def split_segments(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the text in pieces that join to it, each but the first starting with a special token."""
    cuts = [match.start() for match in pattern.finditer(text)]
    bounds = [0, *(cut for cut in cuts if cut), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def _is_safe(token: AddedToken, contents: Iterable[str]) -> bool:
    if not token.special or token.normalized or token.lstrip or token.single_word or not token.content:
        return False
    return not any(_may_swallow(other, token.content) for other in contents)


def _may_swallow(other: str, content: str) -> bool:
    """Whether a match of `other` may cover the start of `content` where that stands in a text."""
    if other == content:
        return any(content.endswith(content[:size]) for size in range(1, len(content)))
    return content in other or any(other.endswith(content[:size]) for size in range(1, len(content)))
