"""From scheduled requests to logits: builds the step's arrays, copies them to the device, and calls the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvist.engine.batch import GroupPages, HostBatch, group_pages, padding_batch, to_device
from kvist.engine.decode_graphs import DecodeGraphs
from kvist.engine.models.transformer import CausalLM
from kvist.engine.request import Request
from kvist.engine.scheduler import ScheduledRequest
from kvist.kernels import on_compile
from kvist.kvcache import WindowPlan
from kvist.kvcache.tensors import KvTensors

logger = logging.getLogger(__name__)

Drawn: TypeAlias = tuple[Sequence[Request], torch.Tensor]  # requests, and the token that the last step draws for each


@dataclass(eq=False)
class Runner:
    """Computes one step after another with the model and the KV tensors.

    A step's arrays are made by a few numpy calls, whatever the number of tokens. If there are `graphs`, they compute
    the steps that are decodes alone.
    """

    model: CausalLM
    plan: WindowPlan
    tensors: KvTensors
    block_size: int
    graphs: DecodeGraphs | None = None

    @property
    def can_wait(self) -> bool:
        """Return whether a step's tokens can be waited for after the next step is launched: this process computes."""
        return self.tensors.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until everything that was launched is computed."""
        if self.tensors.device.type == "cuda":
            torch.cuda.synchronize(self.tensors.device)

    def forward(self, scheduled: Sequence[ScheduledRequest], last: Drawn | None = None) -> torch.Tensor:
        """Compute the step into the cache; return float32 logits of the requests with `is_sampled`, in their order.

        The logits of all `prompt_rows` follow them. `last` is needed for pending tokens.
        """
        requests, drawn = ((), None) if last is None else last
        return self.compute(self.build_batch(scheduled, requests), drawn)

    @torch.inference_mode()
    def compute(self, batch: HostBatch, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """Compute a batch into the cache; return float32 logits of its `logit_rows`. `drawn` as in `to_device`."""
        logits = None if self.graphs is None else self.graphs.run(batch, drawn)
        return self.model(to_device(batch, self.plan, self.tensors, drawn)) if logits is None else logits

    def warm_up(self, table_widths: Sequence[int]) -> None:
        """Compile every kernel that a step can launch, and log them, so that no request waits for the compiler.

        They depend on whether keys are split over programs, and on whether there are several tokens. So three steps of
        padding compile them all: two of a decode and a prefill each, one with tables of one block, the other with the
        widest ones, and one of a single decode.
        """
        variants: list[str] = []
        start = time.monotonic()
        on_compile(variants.append)
        for widths in ([1] * len(table_widths), table_widths):
            self.compute(padding_batch(num_decodes=1, num_prefill_tokens=2, table_widths=widths))
        self.compute(padding_batch(num_decodes=1, num_prefill_tokens=0, table_widths=table_widths))
        on_compile(lambda variant: logger.warning("kernel compiled while serving variant=%s", variant))
        seconds = time.monotonic() - start
        logger.info("kernels compiled num=%d seconds=%.1f variants=%s", len(variants), seconds, "; ".join(variants))

    def build_batch(self, scheduled: Sequence[ScheduledRequest], drawn: Sequence[Request] = ()) -> HostBatch:
        order = sorted(range(len(scheduled)), key=lambda i: scheduled[i].num_new_tokens > 1)
        rows = [scheduled[i] for i in order]
        counts = np.array([row.num_new_tokens for row in rows], dtype=np.int64)
        starts = np.array([row.request.num_computed_tokens for row in rows], dtype=np.int64)
        ends = np.cumsum(counts)
        sequence = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
        places = {request: place for place, request in enumerate(drawn)}
        input_ids: list[int] = []
        pending_rows: list[int] = []
        pending_places: list[int] = []
        for row, start, end in zip(rows, starts, ends, strict=True):
            input_ids += row.request.token_ids[start : start + row.num_new_tokens]
            if len(input_ids) < end:
                pending_rows.append(len(input_ids))
                pending_places.append(places[row.request])
                input_ids.append(0)
        num_decodes = int((counts == 1).sum())
        end_of = dict(zip(order, ends, strict=True))
        sampled = [end_of[i] - 1 for i, each in enumerate(scheduled) if each.is_sampled]
        of_prompts = [
            end_of[i] - each.num_new_tokens + row for i, each in enumerate(scheduled) for row in each.prompt_rows
        ]
        return HostBatch(
            input_ids=np.array(input_ids, dtype=np.int64),
            positions=positions,
            seq_lens=(starts + counts).astype(np.int32),
            num_decodes=num_decodes,
            prefill_start_loc=np.concatenate(([0], np.cumsum(counts[num_decodes:]))).astype(np.int32),
            logit_rows=np.array(sampled + of_prompts, dtype=np.int64),
            groups=self._groups([row.request for row in rows], sequence, positions),
            pending_rows=np.array(pending_rows, dtype=np.int64),
            pending_places=np.array(pending_places, dtype=np.int64),
        )

    def _groups(
        self, requests: Sequence[Request], sequence: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
    ) -> tuple[GroupPages, ...]:
        held = [request.blocks.tables for request in requests if request.blocks is not None]
        return tuple(
            group_pages(
                [tables[group.group_id] for tables in held],
                self.tensors.pools[group.group_id].shape[0],
                len(group.layer_indices),
                self.block_size,
                sequence,
                positions,
            )
            for group in self.plan.groups
        )
