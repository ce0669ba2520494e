"""The requests to an engine whose cache is compared: conversations that share beginnings, and prompts to query."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

VOCABULARY = 32_000
IMAGE_TOKEN = 31_999
MAX_TOKENS = 1_500
"""Of a conversation; a longer one ends."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request is about."""

    token_ids: tuple[int, ...]
    lora_name: str | None = None
    cache_salt: str | None = None
    images: tuple[tuple[str, int, int], ...] = ()
    """The hash of each, where its tokens begin, and how many there are."""
    is_reported: bool = False
    """Asks the engine to report what of it was cached already."""
    session_id: str | None = None
    """Of the request, which events repeat."""

    def cut(self, num_tokens: int) -> Prompt:
        """Return its beginning, without images that would be cut in two."""
        num_tokens = next((at for _, at, length in self.images if at < num_tokens < at + length), num_tokens)
        images = tuple(image for image in self.images if image[1] < num_tokens)
        return replace(self, token_ids=self.token_ids[:num_tokens], images=images)

    def then(self, token_ids: list[int], image: tuple[str, int] | None = None) -> Prompt:
        """Return it with more tokens behind it, and behind those an image of some size."""
        longer = replace(self, token_ids=(*self.token_ids, *token_ids))
        if image is None:
            return longer
        name, length = image
        images = (*self.images, (name, len(longer.token_ids), length))
        return replace(longer, token_ids=longer.token_ids + (IMAGE_TOKEN,) * length, images=images)


class Engine(Protocol):
    """One rank of an engine: its real cache, with a scheduler's loop around it."""

    block_size: int
    """Of the index."""
    names_ahead: bool
    """Whether a block's name covers the token behind it, as with EAGLE."""
    num_tiers: int

    @property
    def num_waiting(self) -> int:
        """Return how many requests do not run."""

    def submit(self, prompt: Prompt, num_outputs: int) -> None:
        """Queue a request."""

    def step(self) -> list[Prompt]:
        """Let the engine run a step; return the conversations that ended with it, answers included."""

    def reset(self) -> None:
        """Drop the whole cache, as an administrator would."""

    def take_batch(self) -> Any | None:
        """Return what has to be published, in the engine's own type."""

    def mark(self, token_ids: list[int], block_hash: int) -> Any:
        """Return a batch that stores a block nobody asked for, by which a follower shows how far it is."""

    def hits(self, prompt: Prompt) -> list[int]:
        """Return how many of the prompt's tokens the engine would take from its cache now, with each tier."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What the requests of a scenario are like; each is a share of them."""

    twice_at_once: float = 0.1
    loras: tuple[str | None, ...] = (None,)
    salts: tuple[str | None, ...] = (None,)
    images: float = 0.0
    reported: float = 0.0
    aligned: int = 16
    """Lengths are often multiples of this, where mistakes by one show."""


@dataclass
class Traffic:
    """Conversations of one engine."""

    rng: random.Random
    mix: Mix
    _systems: list[Prompt] = field(init=False)
    _ended: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._systems = [self._opened(self.rng.randint(20, 160)) for _ in range(3 * len(self.mix.loras))]

    def request(self) -> list[Prompt]:
        """Return a request: a conversation's next turn, a new one, or an old one again; at times twice at once."""
        rng = self.rng
        ended = [each for each in self._ended[-24:] if len(each.token_ids) < MAX_TOKENS]
        choice = rng.random()
        if ended and choice < 0.5:
            prompt = rng.choice(ended).then(self._text(rng.randint(1, 90)), self._image())
        elif ended and choice < 0.65:
            prompt = rng.choice(ended)
        else:
            prompt = rng.choice(self._systems).then(self._text(rng.randint(1, 200)), self._image())
        if rng.random() < 0.3:
            step = self.mix.aligned
            prompt = prompt.cut(max(step, len(prompt.token_ids) // step * step))
        prompt = replace(prompt, is_reported=rng.random() < self.mix.reported)
        return [prompt] * (2 if rng.random() < self.mix.twice_at_once else 1)

    def ended(self, conversations: list[Prompt]) -> None:
        """Remember what can be gone on with."""
        self._ended.extend(replace(each, is_reported=False, session_id=None) for each in conversations)

    def probe(self) -> Prompt:
        """Return a prompt that somebody may send next."""
        rng = self.rng
        known = self._ended[-60:] or self._systems
        prompt = rng.choice(known)
        choice = rng.random()
        if choice < 0.35:
            return prompt.then(self._text(rng.randint(1, 40)))
        if choice < 0.6:
            prompt = prompt.cut(rng.randint(1, len(prompt.token_ids)))
            return prompt.then(self._text(rng.randint(0, 3)))
        if choice < 0.75:
            step = self.mix.aligned
            return prompt.cut(max(1, len(prompt.token_ids) // step * step + rng.choice((-step, 1 - step, 0, 1))))
        if choice < 0.85:
            scoped = replace(prompt, lora_name=rng.choice(self.mix.loras), cache_salt=rng.choice(self.mix.salts))
            return scoped.then(self._text(1))
        if choice < 0.95:
            return rng.choice(self._systems).then(self._text(rng.randint(1, 60)))
        return self._opened(rng.randint(1, 80))

    def _opened(self, num_tokens: int) -> Prompt:
        mix = self.mix
        return Prompt(tuple(self._text(num_tokens)), self.rng.choice(mix.loras), self.rng.choice(mix.salts))

    def _text(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(IMAGE_TOKEN) for _ in range(num_tokens)]

    def _image(self) -> tuple[str, int] | None:
        if self.rng.random() >= self.mix.images:
            return None
        return f"{self.rng.choice((1, 2, 3)):064x}"[::-1], self.rng.randint(3, 70)
