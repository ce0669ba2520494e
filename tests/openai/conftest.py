"""Tokenisers and templates of the four families, written to make the demands that the real ones make."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234 times; it's naïve – déjà vu!",
    "def match(self, hashes: list[int]) -> dict[str, int]:\n    return {}\n",
    'System prompts are shared by many requests, and so are tools: {"type": "function"}.',
] * 4


def _byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _metaspace(special: list[str]) -> Tokenizer:
    """The SentencePiece style of Mistral and Llama 2: a space mark before the first word only, bytes as fallback."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _gemma(special: list[str]) -> Tokenizer:
    tokenizer = _byte_level(special)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


FAMILIES = {
    "llama": (_byte_level, "<|bos|>", "<|turn|>", ["<|head|>", "<|/head|>"]),
    "qwen3": (_byte_level, "<|im_start|>", "<|im_end|>", []),
    "gemma": (_gemma, "<bos>", "<end_of_turn>", ["<start_of_turn>", "<start_of_image>"]),
    "mistral": (
        _metaspace,
        "<s>",
        "</s>",
        [
            "[INST]",
            "[/INST]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ],
    ),
}


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    """Return each family in turn."""
    return str(request.param)


@pytest.fixture(scope="session")
def model_dir(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory as transformers saves it: tokenizer.json, tokenizer_config.json, chat_template.jinja."""
    build, bos, eos, others = FAMILIES[family]
    template = (Path(__file__).parent / "templates" / f"{family}.jinja").read_text()
    tokenizer = build([bos, eos, *others])
    # Qwen marks thoughts with added tokens that are not special; one of them eats the space behind it.
    tokenizer.add_tokens(
        [AddedToken("<think>", normalized=False), AddedToken("</think>", rstrip=True, normalized=False)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=None, special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    path = tmp_path_factory.mktemp(family)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, chat_template=template)
    fast.save_pretrained(path)
    return path
