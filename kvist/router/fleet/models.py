"""The models that workers serve: their names, their aliases, and the files that tokenise their prompts.

`models` or `model_path` of the configuration say where a model's files are; else its workers name a directory, or a
model of the Hugging Face Hub, that this machine has, too. Nothing is downloaded. Each directory is read once, on a
thread; before that, and if there is none, prompts of text are routed by load.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from xxhash import xxh3_64_intdigest

from kvist.contexts import BackgroundTasks, ComposedContext
from kvist.errors import InvalidValueError
from kvist.openai.requests import Fields
from kvist.openai.tokenization import ChatTokenizer
from kvist.router.config import PolicyName, RouterConfig
from kvist.router.fleet.fleet import Fleet
from kvist.router.fleet.identity import Identity
from kvist.router.fleet.worker import WorkerState
from kvist.router.policy.attention import costs_of
from kvist.router.policy.settings import DEFAULT_ALPHA, PriceSettings

logger = logging.getLogger(__name__)

_TOKENIZER = "tokenizer.json"
_STICKY_FIELDS = ("user", "prompt_cache_key")
_PROMPT_FIELDS = ("messages", "input", "prompt")


class ModelFiles(NamedTuple):
    """What a model's directory says: its tokeniser and its cost of attention; `problem` says why there is none."""

    path: str | None = None
    tokenizer: ChatTokenizer | None = None
    alpha: float = DEFAULT_ALPHA
    problem: str | None = "no tokeniser: no --model-path, and no worker reports a directory that is on this machine"


class ModelPolicy(NamedTuple):
    """How workers for a model are chosen, and up to which length the worker that answers computes the prompt itself."""

    policy: PriceSettings | PolicyName
    max_local_prefill_tokens: int


_NONE = ModelFiles()


class Models(ComposedContext):
    """Knows the models of a fleet while its context is open; all methods belong to the event loop."""

    def __init__(
        self, config: RouterConfig, fleet: Fleet, on_loaded: Callable[[ChatTokenizer], None] = lambda _: None
    ) -> None:
        """Follow the models that the workers of `fleet` serve; `on_loaded` is called with each tokeniser."""
        self._config, self._fleet, self._on_loaded = config, fleet, on_loaded
        self._loads: dict[str, asyncio.Task[ModelFiles]] = {}
        self._located: dict[str, str | None] = {}
        self._files_of: dict[str | None, ModelFiles] = {}
        self._bases: dict[str | None, str] = {}
        self._policies: dict[str | None, ModelPolicy] = {}
        self._default = _NONE
        self._tasks = BackgroundTasks()
        fleet.on_models = self.refresh

    async def _open(self, exits: AsyncExitStack) -> None:
        """Start to read the directories that the configuration names."""
        await exits.enter_async_context(self._tasks)
        for path in self._configured_paths():
            self._load(path)

    async def wait_for_configured(self) -> None:
        """Wait for the directories that the configuration names; raises InvalidValueError if one is no model's."""
        for path in self._configured_paths():
            files = await self._load(path)
            if files.tokenizer is None:
                field = "model_path" if path == self._config.model_path else "models"
                raise InvalidValueError(field, path, f"a model's directory ({files.problem or _TOKENIZER})")

    def reconfigure(self, config: RouterConfig) -> None:
        self._config = config
        self.refresh()

    def files(self, model: str | None) -> ModelFiles:
        """Return the files of a model; of the only one, if the model is not known or a request names none."""
        return self._files_of.get(model, self._default)

    def tokenizer(self, model: str | None) -> ChatTokenizer | None:
        """Return the model's tokeniser, None if its prompts cannot be tokenised."""
        return self.files(model).tokenizer

    def engine(self, model: str | None) -> str | None:
        """Return the engine of the model's workers; of several, vLLM, or else none."""
        return self._fleet.engine_of(model)

    def policy(self, model: str | None) -> ModelPolicy:
        known = model if model in self._files_of else None
        if known not in self._policies:
            config = self._config.of(self._bases.get(known, known))
            policy = config.make_policy(self.files(known).alpha)
            self._policies[known] = ModelPolicy(policy, config.max_local_prefill_tokens)
        return self._policies[known]

    @property
    def prefill_dialect(self) -> str:
        """Return the dialect of prefill workers that do not say which engine they are."""
        return self._config.prefill_dialect

    def refresh(self) -> None:
        """Update which models there are, and start to read directories that are new."""
        paths: dict[str, str | None] = {}
        self._policies.clear()
        self._bases.clear()
        for worker in self._fleet.workers:
            for model in worker.identity.models or ():
                base = self._bases[model.id] = model.parent or model.id
                if paths.get(model.id) is None:
                    paths[model.id] = self._path_of(base, worker.identity)
        for path in {*self._configured_paths(), *filter(None, paths.values())}:
            self._load(path)
        self._files_of = {model: self._files_in(path) for model, path in paths.items()}
        known = {path for path in paths.values() if path is not None}
        default = self._config.model_path or (known.pop() if len(known) == 1 else None)
        self._default = self._files_in(default)

    def resolve_alias(self, fields: Fields) -> str | None:
        """Return the model that an alias stands for, None if the request names no alias.

        If an alias stands for several models, a conversation always gets the same one, by its `user` or
        `prompt_cache_key`, else by its first turn.
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
        """Yield the list of `GET /v1/models`: the allowed models that healthy workers serve, and their aliases."""
        served: dict[str, dict[str, Any]] = {}
        for worker in self._fleet.workers:
            for model in worker.identity.models or () if worker.state is WorkerState.HEALTHY else ():
                if allowed is None or model.id in allowed:
                    served.setdefault(model.id, model.entry)
        yield from served.values()
        for alias, shares in self._config.aliases.items():
            if alias not in served and (targets := shares.keys() & served.keys()):
                root = max(targets, key=lambda target: (shares[target], target))
                yield served[root] | {"id": alias, "root": root, "parent": None}

    def explain(self) -> dict[str, Any]:
        """Return for each model how many workers serve it and how it is tokenised, and what each alias stands for."""
        page: dict[str, Any] = {}
        for worker in self._fleet.workers:
            for model in worker.identity.models or ():
                files = self.files(model.id)
                row = {"workers": 0, "healthy": 0, "adapter_of": model.parent}
                row |= {"tokenizer": files.path, "problem": files.problem}
                each = page.setdefault(model.id, row)
                each["workers"] += 1
                each["healthy"] += worker.state is WorkerState.HEALTHY
        for alias, shares in self._config.aliases.items():
            page[alias] = {"alias_of": shares}
        return page

    def _configured_paths(self) -> list[str]:
        named = [self._config.model_path, *(model.path for model in self._config.models.values())]
        return [path for path in named if path is not None]

    def _path_of(self, base: str, identity: Identity) -> str | None:
        if (path := self._config.of(base).model_path) is not None:
            return path
        if self._config.policy != "kv":
            return None
        roots = [model.entry.get("root") for model in identity.models or () if model.id == base]
        claims = [*identity.model_paths, *(root for root in roots if isinstance(root, str)), base]
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
        self.refresh()
        if files.tokenizer is None:
            logger.warning("no tokeniser, text is routed by load path=%s reason=%s", files.path, files.problem)
        else:
            logger.info("tokeniser loaded path=%s", files.path)
            self._on_loaded(files.tokenizer)

    def _files_in(self, path: str | None) -> ModelFiles:
        """Return what was read of a directory so far."""
        if path is None:
            return _NONE
        load = self._loads[path]
        return load.result() if load.done() else ModelFiles(path, problem="being read")


def read_files(path: str) -> ModelFiles:
    try:
        tokenizer, problem = ChatTokenizer.load(Path(path)), None
    except InvalidValueError as error:
        tokenizer, problem = None, str(error)
    return ModelFiles(path, tokenizer, read_alpha(path), problem)


def read_alpha(path: str) -> float:
    """Return the cost of attention by a model's `config.json`, or that of an 8B model if it does not say."""
    try:
        config = msgspec.json.decode((Path(path) / "config.json").read_bytes(), type=dict)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return DEFAULT_ALPHA
    costs = costs_of(config)
    return DEFAULT_ALPHA if costs is None else costs.alpha


def locate(claim: str) -> str | None:
    """Return the local directory of a model that a worker names by a path or a name on the Hub, if there is one."""
    path = Path(claim)
    if path.is_absolute():
        return claim if (path / _TOKENIZER).is_file() else None
    from huggingface_hub import try_to_load_from_cache  # comes with tokenizers

    try:
        cached = try_to_load_from_cache(claim, _TOKENIZER)
    except ValueError:  # not a name on the Hub
        return None
    return str(Path(cached).parent) if isinstance(cached, str) else None


def _sticky_part(fields: Fields) -> Any:
    """Return the part of a request that all requests of a conversation share."""
    key = next((fields[name] for name in _STICKY_FIELDS if isinstance(fields.get(name), str)), None)
    turns = next((fields[name] for name in _PROMPT_FIELDS if fields.get(name)), None)
    if key is not None or not isinstance(turns, list):
        return key or turns
    return next((turn for turn in turns if isinstance(turn, dict) and turn.get("role") == "user"), turns)
