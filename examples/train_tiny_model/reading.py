"""The model's input: a tokenizer, a chat template, and a stream of documents and conversations."""

import random

import torch
from corpus import Entry
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

PAD, EOS, BOS, START, END = SPECIAL_TOKENS = ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"]
# Content is written as it came, untrimmed: a later turn then extends the tokens of the earlier ones.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' -}}
    {%- if message['content'] is string -%}
        {{- message['content'] -}}
    {%- else -%}
        {%- for part in message['content'] or [] if part['type'] == 'text' -%}{{- part['text'] -}}{%- endfor -%}
    {%- endif -%}
    {{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer questions about Python and its standard library.",
    "You are a concise assistant. Answer in one or two sentences.",
    "You are a patient teacher. Use simple words and be exact.",
)
QUESTIONS = (
    "What does {} do?", "What is {}?", "Explain {}.", "Tell me about {}.", "How do I use {}?", "When is {} useful?"
)  # fmt: skip
SMALL_TALK = (
    ("Hello!", "Hello! Ask me about a module, a class or a function of Python's standard library."),
    ("Hi, how are you?", "I am well, thank you. Which part of Python's library shall we look at?"),
    ("Who are you?", "I am a very small language model. I have read the documentation that comes with Python."),
    ("What can you do?", "I can describe the modules, classes and functions of Python's standard library."),
    ("Thanks!", "You are welcome. Ask me about another function if you like."),
)


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE: any text encodes and decodes to itself; a text outside a conversation gets a <bos>."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet)
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bpe.token_to_id(BOS))])
    names = {"pad_token": PAD, "eos_token": EOS, "bos_token": BOS, "additional_special_tokens": [START, END]}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=CHAT_TEMPLATE, model_max_length=8192, **names)


class Mixture:
    """An endless stream of training rows: documents and conversations, each row from the start of one."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, entries: list[Entry], seed: int) -> None:
        self._tokenizer = tokenizer
        self._entries = entries
        self._rng = random.Random(seed)
        texts = [f"{BOS}{entry.text}{EOS}" for entry in entries]
        self._documents = [text[at : at + 2000] for text in texts for at in range(0, len(text), 2000)]

    def batch(self, num_rows: int, num_tokens: int) -> torch.Tensor:
        return torch.tensor([self._row(num_tokens) for _ in range(num_rows)])

    def _row(self, num_tokens: int) -> list[int]:
        row: list[int] = []
        while len(row) < num_tokens:
            is_document = self._rng.random() < 0.35
            text = self._rng.choice(self._documents) if is_document else self._conversation(num_tokens // 128)
            row += self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return row[:num_tokens]

    def _conversation(self, max_references: int) -> str:
        """Questions about neighbouring names, sometimes with a reference that holds the answers."""
        rng, first = self._rng, self._rng.randrange(len(self._entries))
        nearby = [e for e in self._entries[first : first + max(5, max_references)] if "._" not in e.name]
        system = rng.choice(SYSTEM_PROMPTS)
        asked = rng.sample(nearby, min(len(nearby), rng.choice((1, 1, 2, 3, 5))))
        if rng.random() < 0.3:
            system += "\n\nReference:\n" + "\n".join(entry.answer for entry in nearby[:max_references])
        turns = [(rng.choice(QUESTIONS).format(entry.name), entry.answer) for entry in asked]
        if rng.random() < 0.1 or not turns:
            turns.insert(0, rng.choice(SMALL_TALK))
        messages = [{"role": "system", "content": system}] if rng.random() < 0.7 else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
