"""Have Ray Serve send each chat to the replica that holds its prefix: two replicas of the bundled engine.

    pip install 'kvist[engine,ray]' httpx
    python examples/ray_serve_router.py

Asks four questions about each of two documents, and prints which replica answered and how much of it was cached.
"""

from __future__ import annotations

from typing import Any

import httpx
import ray
from ray import serve

from kvist.engine import bundled_model_path
from kvist.router.doors.ray import request_router

ROUTER = request_router(model_path=str(bundled_model_path()))
DOCUMENTS = ("A twig is a thin branch of a tree. " * 30, "A cache keeps what may be asked for again. " * 30)


@serve.deployment(num_replicas=2, request_router_config=ROUTER)
class Engine:
    """The bundled engine behind its own API, in the replica's process."""

    async def __init__(self) -> None:
        from kvist.engine.async_engine import AsyncEngine
        from kvist.engine.config import EngineConfig
        from kvist.engine.loading import load_engine
        from kvist.engine.server.api import Api, ServedModel
        from kvist.http import HttpServer
        from kvist.openai.tokenization import ChatTokenizer
        from kvist.publisher import KvEventPublisher

        path = bundled_model_path()
        self.replica = serve.get_replica_context().replica_id.unique_id
        stream = f"tcp://{ray.util.get_node_ip_address()}:0"
        self.publisher = KvEventPublisher(stream, worker=self.replica, block_size=16)
        loaded = load_engine(EngineConfig(model_dir=path, max_num_waiting=8), self.publisher)
        engine = await AsyncEngine(loaded.core, max_num_open=64).__aenter__()
        model = ServedModel(names=("kvist-tiny",), path=str(path), kv_cache_dtype=loaded.kv_cache_dtype)
        server = await HttpServer(Api(engine, ChatTokenizer.load(path), model).handle).__aenter__()
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", trust_env=False)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Tell Kvist where the replica streams its KV events."""
        return {"kv_event_sources": [self.publisher.endpoint]}

    async def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a chat, and say who did."""
        answer = await self.client.post("/v1/chat/completions", json=request)
        return {"replica": self.replica, **answer.json()}


def main() -> None:
    """Ask about the documents in turn."""
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    engines = serve.run(Engine.bind())
    for question in ("What is it about?", "How long is it?", "Who wrote it?", "And why?"):
        for document in DOCUMENTS:
            messages = [{"role": "user", "content": f"{document}\n\n{question}"}]
            answer = engines.remote({"messages": messages, "max_tokens": 4}).result()
            cached, prompt = answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]
            print(f"{answer['replica']} had {cached} of {prompt} tokens of {question!r} about {document[:7]!r}")
    serve.shutdown()


if __name__ == "__main__":
    main()
