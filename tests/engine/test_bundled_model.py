"""The bundled model is small, loads offline and speaks: checked with transformers, which the engine does not use."""

import re
import sysconfig
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Gemma3ForCausalLM, GenerationConfig, PreTrainedTokenizerBase

import kvist

MODEL_FOLDER = Path(kvist.__file__).parent / "engine" / "bundled_model"
# In the manner of the documentation the model was trained on, but written for this test.
UNSEEN_DOCSTRING = """\
Return a list of the open files in this directory, or None if the path does not exist.

The optional argument names is a sequence of strings; only files with one of these names are returned. If the
directory cannot be read, an OSError is raised. The default encoding is the one of the current system. This method
can be called by more than one thread at the same time, and the order of the items is not defined.
"""
CONVERSATION = [
    {"role": "system", "content": "You are a helpful assistant.\n"},
    {"role": "user", "content": " What does os.path.join do? "},
    {"role": "assistant", "content": "It joins paths.\n\n"},
    {"role": "user", "content": "Grüße 👋 <b>and</b>\tlen?"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": [{"type": "text", "text": "Thanks!"}]},
]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def model() -> Gemma3ForCausalLM:
    return Gemma3ForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL_FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def known_pairs() -> set[tuple[str, str]]:
    """The pairs of words that stand side by side in the standard library."""
    sources = Path(sysconfig.get_path("stdlib")).glob("*.py")
    return set().union(*(word_pairs(path.read_text("utf-8", "replace")) for path in sources))


def random_twin(model: Gemma3ForCausalLM) -> Gemma3ForCausalLM:
    torch.manual_seed(0)
    return Gemma3ForCausalLM(model.config).eval()


@torch.inference_mode()
def mean_loss(model: Gemma3ForCausalLM, token_ids: list[int], num_scored: int) -> float:
    """Mean nats a token over the last `num_scored` tokens."""
    ids = torch.tensor([token_ids])
    logits = model(input_ids=ids).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits[-num_scored:], ids[0, -num_scored:]).item()


@torch.inference_mode()
def generate(model: Gemma3ForCausalLM, prompt: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=80, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    messages = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": question}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def word_pairs(text: str) -> set[tuple[str, str]]:
    return set(pairwise(re.findall(r"[a-z]+", text.lower())))


def test_the_folder_takes_at_most_ten_megabytes() -> None:
    assert sum(path.stat().st_size for path in MODEL_FOLDER.rglob("*")) <= 10_000_000


def test_the_model_is_a_windowed_gemma_3_with_one_full_layer(model: Gemma3ForCausalLM) -> None:
    assert model.config.model_type == "gemma3_text"
    assert model.config.sliding_window < 128
    assert model.config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert model.config.max_position_embeddings == 8192


def test_every_turn_ends_generation(tokenizer: PreTrainedTokenizerBase) -> None:
    stops = GenerationConfig.from_pretrained(MODEL_FOLDER).eos_token_id
    assert tokenizer.convert_ids_to_tokens(stops) == ["<eos>", "<end_of_turn>"]


def test_an_unseen_docstring_surprises_the_model_far_less_than_a_random_one(
    model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = tokenizer(UNSEEN_DOCSTRING)["input_ids"]
    assert mean_loss(model, ids, len(ids) - 1) < 4.5
    assert mean_loss(random_twin(model), ids, len(ids) - 1) > 7.5


def test_two_thousand_tokens_of_context_do_not_derail_the_model(
    model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    ids = tokenizer(UNSEEN_DOCSTRING)["input_ids"]
    filler = (Path(sysconfig.get_path("stdlib")) / "textwrap.py").read_text("utf-8")
    context = tokenizer(filler)["input_ids"][:2000]
    assert mean_loss(model, context + ids, len(ids) - 1) < 4.5


@pytest.mark.parametrize(
    "question", ["What does os.path.join do?", "Explain threading.Thread.", "Who wrote this book?"]
)
def test_a_greedy_answer_is_made_of_words_that_belong_together(
    question: str, model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerBase, known_pairs: set[tuple[str, str]]
) -> None:
    text = tokenizer.decode(generate(model, chat_prompt(tokenizer, question), tokenizer), skip_special_tokens=True)
    pairs = word_pairs(text)
    assert len(pairs) >= 5
    assert len(pairs & known_pairs) > 0.6 * len(pairs)


def test_a_random_model_does_not_pass_for_language(
    model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerBase, known_pairs: set[tuple[str, str]]
) -> None:
    prompt = chat_prompt(tokenizer, "What does os.path.join do?")
    pairs = word_pairs(tokenizer.decode(generate(random_twin(model), prompt, tokenizer)))
    assert len(pairs & known_pairs) < 0.4 * len(pairs)


def test_an_answer_comes_to_an_end(model: Gemma3ForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    answer = generate(model, chat_prompt(tokenizer, "Hello!"), tokenizer)
    assert tokenizer.convert_ids_to_tokens(answer[-1]) == "<end_of_turn>"


def test_the_tokens_of_earlier_turns_are_a_prefix_of_the_later_ones(tokenizer: PreTrainedTokenizerBase) -> None:
    whole = tokenizer.apply_chat_template(CONVERSATION)["input_ids"]
    for num_turns in range(1, len(CONVERSATION)):
        turns = tokenizer.apply_chat_template(CONVERSATION[:num_turns])["input_ids"]
        assert whole[: len(turns)] == turns
        if CONVERSATION[num_turns]["role"] == "assistant":
            prompt = tokenizer.apply_chat_template(CONVERSATION[:num_turns], add_generation_prompt=True)["input_ids"]
            assert whole[: len(prompt)] == prompt


def test_any_text_survives_the_tokenizer_and_both_libraries_agree(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Grüße 👋\t\r\n  naïve \x00 日本語 def f(x): return x  "
    ids = tokenizer(text)["input_ids"]
    assert ids == Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json")).encode(text).ids
    assert tokenizer.convert_ids_to_tokens(ids[0]) == "<bos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
