"""Workers whose blocks do not mean the same refuse each other before a byte moves, and answer all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SIZES = ("--num-blocks", "48", "--max-model-len", "128")
PROMPT = [3 + i * i for i in range(8)]

pytestmark = pytest.mark.xdist_group("transfer kills")


async def test_workers_with_another_block_size_hash_model_or_dtype_are_refused_with_both_values(
    serve: Callable[..., Any], much_kv: Path
) -> None:
    different: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
        (("--block-size", "8"), {}, "block_size: ours=4 theirs=8"),
        (("--block-size", "4"), {"hash_root": 7}, "hash_seed: ours="),
        (("--block-size", "4", "--served-model-name", "other"), {}, "model: ours=tiny theirs=other"),
        (("--block-size", "4", "--dtype", "bfloat16"), {}, "dtype: ours=group 0 dtype float32 theirs="),
    )
    async with serve(much_kv, *SIZES, "--block-size", "4") as source:
        for num_refused, (flags, changes, reason) in enumerate(different, 1):
            async with serve(much_kv, *SIZES, *flags, **changes) as target:
                params = await source.prefill(PROMPT)
                text = await target.text({"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params})
                assert text == await target.text({"prompt": PROMPT, "max_tokens": 4})
                (told,) = target.failures()
                assert told.startswith(reason)
                await target.is_idle()
            assert await source.metric("transfer_refused_greetings") == num_refused
            await source.is_idle()
            assert await source.metric("transfer_sent_bytes") == 0
        async with serve(much_kv, *SIZES, "--block-size", "4") as target:
            params = await source.prefill(PROMPT)
            await target.text({"prompt": PROMPT, "max_tokens": 4, "kv_transfer_params": params})
            assert await target.metric("engine_prompts_fetched") == 1
