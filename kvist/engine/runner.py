"""From scheduled requests to logits: builds the step's arrays on the host, copies them, and calls the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvist.engine.batch import ForwardBatch, GroupPages, HostBatch, LayerPages, group_pages
from kvist.engine.decode_graphs import DecodeGraphs
from kvist.engine.models.transformer import CausalLM
from kvist.engine.request import Request
from kvist.engine.scheduler import ScheduledRequest
from kvist.kernels import on_compile
from kvist.kvcache import ABSENT, WindowPlan
from kvist.kvcache.tensors import KvTensors

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Runner:
    """Owns the model and the KV tensors; knows nothing of what comes next.

    A step's arrays are made with numpy, a few a step whatever the number of tokens. Steps of decodes alone go through
    `graphs` where there are any.
    """

    model: CausalLM
    plan: WindowPlan
    tensors: KvTensors
    block_size: int
    graphs: DecodeGraphs | None = None

    def forward(self, scheduled: Sequence[ScheduledRequest]) -> torch.Tensor:
        """Compute the step into the cache; return the logits, float32, of the requests with `is_sampled`, in order.

        Behind them are those of all `prompt_rows`.
        """
        return self.compute(self.build_batch(scheduled))

    @torch.inference_mode()
    def compute(self, batch: HostBatch) -> torch.Tensor:
        """Compute a batch into the cache; return the logits, float32, of its `logit_rows`."""
        logits = None if self.graphs is None else self.graphs.run(batch)
        return self.model(self._to_forward_batch(batch)) if logits is None else logits

    def warm_up(self, table_widths: Sequence[int]) -> None:
        """Compile every kernel that a step can launch, and log them: no request waits for a compiler.

        They depend on nothing of a step but whether keys are split over programs. So two steps of a decode and a
        prefill, all padding, compile all: one over tables of one block, one over the most local blocks of each group.
        """
        variants: list[str] = []
        start = time.monotonic()
        on_compile(variants.append)
        for widths in ([1] * len(table_widths), table_widths):
            groups = [
                GroupPages(
                    np.full((1, 2, width), ABSENT, np.int32), np.zeros(2, np.int32), np.full((1, 3), ABSENT, np.int64)
                )
                for width in widths
            ]
            self.compute(
                HostBatch(
                    input_ids=np.zeros(3, np.int64),
                    positions=np.zeros(3, np.int64),
                    seq_lens=np.zeros(2, np.int32),
                    num_decodes=1,
                    prefill_start_loc=np.array([0, 2], np.int32),
                    logit_rows=np.array([0, 2]),
                    groups=tuple(groups),
                )
            )
        on_compile(lambda variant: logger.warning("kernel compiled while serving variant=%s", variant))
        seconds = time.monotonic() - start
        logger.info("kernels compiled num=%d seconds=%.1f variants=%s", len(variants), seconds, "; ".join(variants))

    def build_batch(self, scheduled: Sequence[ScheduledRequest]) -> HostBatch:
        order = sorted(range(len(scheduled)), key=lambda i: scheduled[i].num_new_tokens > 1)
        rows = [scheduled[i] for i in order]
        counts = np.array([row.num_new_tokens for row in rows], dtype=np.int64)
        starts = np.array([row.request.num_computed_tokens for row in rows], dtype=np.int64)
        ends = np.cumsum(counts)
        sequence = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts) + np.repeat(starts, counts)
        input_ids = np.fromiter(
            (
                token_id
                for row, start in zip(rows, starts, strict=True)
                for token_id in row.request.token_ids[start : start + row.num_new_tokens]
            ),
            dtype=np.int64,
            count=len(positions),
        )
        num_decodes = int((counts == 1).sum())
        end_of = dict(zip(order, ends, strict=True))
        sampled = [end_of[i] - 1 for i, each in enumerate(scheduled) if each.is_sampled]
        of_prompts = [
            end_of[i] - each.num_new_tokens + row for i, each in enumerate(scheduled) for row in each.prompt_rows
        ]
        return HostBatch(
            input_ids=input_ids,
            positions=positions,
            seq_lens=(starts + counts).astype(np.int32),
            num_decodes=num_decodes,
            prefill_start_loc=np.concatenate(([0], np.cumsum(counts[num_decodes:]))).astype(np.int32),
            logit_rows=np.array(sampled + of_prompts, dtype=np.int64),
            groups=self._groups([row.request for row in rows], sequence, positions),
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

    def _to_forward_batch(self, batch: HostBatch) -> ForwardBatch:
        by_group = [
            (
                self._to_device(group.block_tables).unbind(),
                self._to_device(group.page_offsets),
                self._to_device(group.slot_mapping).unbind(),
            )
            for group in batch.groups
        ]
        layers = []
        for layer_idx, (group_id, position) in enumerate(self.plan.places):
            tables, offsets, slots = by_group[group_id]
            is_shared = batch.groups[group_id].is_shared
            cache = self.tensors.by_slot(layer_idx) if is_shared else self.tensors.by_page(layer_idx)
            row = 0 if is_shared else position
            layers.append(LayerPages(cache, tables[row], offsets, slots[row]))
        return ForwardBatch(
            input_ids=self._to_device(batch.input_ids),
            positions=self._to_device(batch.positions),
            seq_lens=self._to_device(batch.seq_lens),
            num_decodes=batch.num_decodes,
            prefill_start_loc=self._to_device(batch.prefill_start_loc),
            logit_rows=self._to_device(batch.logit_rows),
            layers=tuple(layers),
        )

    def _to_device(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.tensors.device)
