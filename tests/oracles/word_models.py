"""Models whose tokens are words, so that a test knows a prompt's tokens by looking at it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = [f"w{number}" for number in range(200)]


def model_dir(path: Path, first_token: int) -> str:
    """Make the directory of a model whose word `w0` is this token, `w1` the next, and so on."""
    path.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({word: first_token + idx for idx, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    source = "{% for message in messages %}{{ message.content }} {% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    return str(path)
