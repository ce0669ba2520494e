"""The models that workers serve: under which names, and from which files their prompts become tokens.

Where a model's files are, `models` or `model_path` of the configuration say; else its workers: a directory, or a name
on the Hugging Face Hub, that is there on this machine, too. Nothing is fetched. Each directory is read once, on a
thread; until it is, and where none is found, prompts of text are routed by load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec
from xxhash import xxh3_64_intdigest

from kvist.errors import InvalidValueError, leave_group
from kvist.openai.requests import Fields
from kvist.openai.tokenization import INLINE_BODY_BYTES, ChatTokenizer
from kvist.router.config import RouterConfig
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.identity import Identity, ServedModel
from kvist.router.fleet.worker import WorkerState
from kvist.router.policy.attention import costs_of
from kvist.router.policy.decision import Policy
from kvist.router.policy.settings import DEFAULT_ALPHA, PriceSettings

logger = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"
_STICKY_FIELDS = ("user", "prompt_cache_key")
_PROMPT_FIELDS = ("messages", "input", "prompt")


class ModelFiles(NamedTuple):
    """What a model's directory is read for: its tokeniser and what attention costs it; `problem` says what lacks."""

    path: str | None = None
    tokenizer: ChatTokenizer | None = None
    alpha: float = DEFAULT_ALPHA
    problem: str | None = "no worker names a directory of this machine, and no configuration does"


class ModelPolicy(NamedTuple):
    """How workers for a model are chosen, and from which length on prompts are computed for others."""

    policy: Policy | PriceSettings
    max_local_prefill_tokens: int


_NONE = ModelFiles()


class Models:
    """Knows the models of a fleet while its context is open; all methods belong to the event loop."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, on_loaded: Callable[[ChatTokenizer], None] = lambda _: None
    ) -> None:
        """Look for what the workers of `fleet` serve whenever that changes; a tokeniser that is there is told."""
        self._config, self._fleet, self._on_loaded = config, fleet, on_loaded
        self._loads: dict[str, asyncio.Task[ModelFiles]] = {}
        self._located: dict[str, str | None] = {}
        self._files_of: dict[str | None, ModelFiles] = {}
        self._bases: dict[str | None, str] = {}
        self._policies: dict[str | None, ModelPolicy] = {}
        self._default = _NONE
        self._tasks = asyncio.TaskGroup()
        self.inline_body_bytes = INLINE_BODY_BYTES
        """How long a body may be that is read on the event loop, whatever its model."""
        fleet.on_models = self.look

    async def __aenter__(self) -> Self:
        """Begin to read what the configuration names."""
        await self._tasks.__aenter__()
        for path in self._configured_paths():
            self._load(path)
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for load in self._loads.values():
            load.cancel()
        await leave_group(self._tasks, error)

    async def configured(self) -> None:
        """Wait for what the configuration names; raises InvalidValueError if some of it is no model's directory."""
        for path in self._configured_paths():
            files = await self._load(path)
            if files.tokenizer is None:
                raise InvalidValueError("model_path", path, f"a model's directory ({files.problem or _TOKENIZER})")

    def reconfigure(self, config: RouterConfig) -> None:
        """Go by another configuration from now on."""
        self._config = config
        self.look()

    def files(self, model: str | None) -> ModelFiles:
        """Return what is known of a model, or of the one there is where a request names none."""
        return self._files_of.get(model, self._default)

    def tokenizer(self, model: str | None) -> ChatTokenizer | None:
        """Return the model's tokeniser, None where its text cannot be read."""
        return self.files(model).tokenizer

    def policy(self, model: str | None) -> ModelPolicy:
        """Return how the configuration has workers for a model chosen."""
        known = model if model in self._files_of else None
        if known not in self._policies:
            config = self._config.of(self._bases.get(known, known))
            policy = config.make_policy(self.files(known).alpha)
            self._policies[known] = ModelPolicy(policy, config.max_local_prefill_tokens)
        return self._policies[known]

    @property
    def prefill_dialect(self) -> str:
        """Return what workers speak to hand prompts over that do not say."""
        return self._config.prefill_dialect

    def look(self) -> None:
        """See which models there are now, and begin to read what is new; what is read already counts at once."""
        paths: dict[str, str | None] = {}
        self._policies.clear()
        self._bases.clear()
        for worker in self._fleet.workers:
            for model in worker.identity.models or ():
                self._bases[model.id] = model.parent or model.id
                if paths.get(model.id) is None:
                    paths[model.id] = self._path_of(self._bases[model.id], model, worker.identity)
        for path in {*self._configured_paths(), *filter(None, paths.values())}:
            self._load(path)
        self._files_of = {model: self._read_by_now(path) for model, path in paths.items()}
        known = {path for path in paths.values() if path is not None}
        default = self._config.model_path or (known.pop() if len(known) == 1 else None)
        self._default = self._read_by_now(default)
        files = (*self._files_of.values(), self._default)
        limits = [each.tokenizer.inline_body_bytes for each in files if each.tokenizer is not None]
        self.inline_body_bytes = min(limits, default=INLINE_BODY_BYTES)

    def target(self, fields: Fields) -> str | None:
        """Return the model that a request is for if it names an alias.

        Of several, one conversation always gets the same: who says `user` or `prompt_cache_key` by that, others by
        their first turn.
        """
        model = fields.get("model")
        shares = self._config.aliases.get(model) if isinstance(model, str) else None
        if shares is None:
            return None
        place = xxh3_64_intdigest(repr(_sticky_part(fields)).encode()) / 2**64 * sum(shares.values())
        for target, share in shares.items():
            place -= share
            if place < 0:
                return target
        return next(reversed(shares))

    def entries(self, allowed: Collection[str] | None = None) -> Iterator[dict[str, Any]]:
        """Yield what `GET /v1/models` lists: what healthy workers serve, of what is allowed, and aliases of that."""
        served = {model.id: model.entry for model in self._fleet.models() if allowed is None or model.id in allowed}
        yield from served.values()
        for alias, shares in self._config.aliases.items():
            if alias not in served and (targets := shares.keys() & served.keys()):
                root = max(targets, key=lambda target: (shares[target], target))
                yield served[root] | {"id": alias, "root": root, "parent": None}

    def explain(self) -> dict[str, Any]:
        """Return, for each model, how many workers serve it, and how its prompts are read; and what aliases mean."""
        page: dict[str, Any] = {}
        for worker in self._fleet.workers:
            for model in worker.identity.models or ():
                files = self.files(model.id)
                told = {"workers": 0, "healthy": 0, "adapter_of": model.parent}
                told |= {"tokenizer": files.path, "problem": files.problem}
                each = page.setdefault(model.id, told)
                each["workers"] += 1
                each["healthy"] += worker.state is WorkerState.HEALTHY
        for alias, shares in self._config.aliases.items():
            page[alias] = {"alias_of": shares}
        return page

    def _configured_paths(self) -> list[str]:
        named = [self._config.model_path, *(model.path for model in self._config.models.values())]
        return [path for path in named if path is not None]

    def _path_of(self, base: str, model: ServedModel, identity: Identity) -> str | None:
        if (path := self._config.of(base).model_path) is not None:
            return path
        if self._config.policy != "kv":
            return None
        root = model.entry.get("root") if model.parent is None else None
        claims = [*identity.model_paths, *([root] if isinstance(root, str) else []), base]
        for claim in claims:
            if claim not in self._located:
                self._located[claim] = locate(claim)
        return next(filter(None, map(self._located.get, claims)), None)

    def _load(self, path: str) -> asyncio.Task[ModelFiles]:
        if path not in self._loads:
            self._loads[path] = load = self._tasks.create_task(asyncio.to_thread(read_files, path), name="kvist-model")
            load.add_done_callback(self._on_load)
        return self._loads[path]

    def _on_load(self, load: asyncio.Task[ModelFiles]) -> None:
        if load.cancelled() or load.exception() is not None:
            return
        files = load.result()
        self.look()
        if files.tokenizer is None:
            logger.warning("prompts are routed by load path=%s reason=%s", files.path, files.problem)
        else:
            logger.info("tokeniser loaded path=%s", files.path)
            self._on_loaded(files.tokenizer)

    def _read_by_now(self, path: str | None) -> ModelFiles:
        if path is None:
            return _NONE
        load = self._loads[path]
        return load.result() if load.done() else ModelFiles(path, problem="being read")


def read_files(path: str) -> ModelFiles:
    """Return what is in a model's directory."""
    try:
        tokenizer, problem = ChatTokenizer.load(Path(path)), None
    except InvalidValueError as error:
        tokenizer, problem = None, str(error)
    return ModelFiles(path, tokenizer, read_alpha(path), problem)


def read_alpha(path: str) -> float:
    """Return what attention costs the model of a directory, or an 8B model where its `config.json` does not say."""
    try:
        config = msgspec.json.decode((Path(path) / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return DEFAULT_ALPHA
    costs = costs_of(config)
    return DEFAULT_ALPHA if costs is None else costs.alpha


def locate(claim: str) -> str | None:
    """Return where the files of a model are here that a worker names: its directory, or what the Hub's cache has."""
    path = Path(claim)
    if path.is_absolute():
        return claim if (path / _TOKENIZER).is_file() else None
    from huggingface_hub import try_to_load_from_cache  # comes with tokenizers

    try:
        cached = try_to_load_from_cache(claim, _TOKENIZER)
    except ValueError:  # it is no name
        return None
    return str(Path(cached).parent) if isinstance(cached, str) else None


def _sticky_part(fields: Fields) -> Any:
    """Return what the turns of one conversation have in common."""
    said = next((fields[name] for name in _STICKY_FIELDS if isinstance(fields.get(name), str)), None)
    turns = next((fields[name] for name in _PROMPT_FIELDS if fields.get(name)), None)
    if said is not None or not isinstance(turns, list):
        return said or turns
    return next((turn for turn in turns if isinstance(turn, dict) and turn.get("role") == "user"), turns)
