"""From scheduled requests to logits: builds the step's tensors for every KV group and calls the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvist.engine.batch import ForwardBatch, LayerPages
from kvist.engine.models.transformer import CausalLM
from kvist.engine.request import Request
from kvist.engine.scheduler import ScheduledRequest
from kvist.kvcache import KvGroup
from kvist.kvcache.manager import ABSENT, BlockTable
from kvist.kvcache.tensors import layer_caches

IntArray = npt.NDArray[np.int64]


class Runner:
    """Owns the model and the KV pools; knows nothing of what comes next.

    A step's tensors are made on the host with numpy, a few arrays a step whatever the number of tokens, and copied.
    """

    def __init__(
        self, model: CausalLM, groups: Sequence[KvGroup], pools: Sequence[torch.Tensor], block_size: int
    ) -> None:
        self._model = model
        self._groups = groups
        self._caches = layer_caches(groups, pools)
        self._block_size = block_size
        self._device = pools[0].device

    @torch.inference_mode()
    def forward(self, scheduled: Sequence[ScheduledRequest]) -> torch.Tensor:
        """Compute the step into the cache; return the logits, float32, of the requests with `is_sampled`, in order."""
        logits: torch.Tensor = self._model(self.build_batch(scheduled))
        return logits

    def build_batch(self, scheduled: Sequence[ScheduledRequest]) -> ForwardBatch:
        """Return the step's tensors, on the model's device."""
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
        prefill_start_loc = np.concatenate(([0], np.cumsum(counts[num_decodes:])))
        last_row = dict(zip(order, ends - 1, strict=True))
        logit_rows = [last_row[i] for i, each in enumerate(scheduled) if each.is_sampled]
        requests = [row.request for row in rows]
        return ForwardBatch(
            input_ids=self._to_device(input_ids),
            positions=self._to_device(positions),
            seq_lens=self._to_device((starts + counts).astype(np.int32)),
            num_decodes=num_decodes,
            prefill_start_loc=self._to_device(prefill_start_loc.astype(np.int32)),
            logit_rows=self._to_device(np.array(logit_rows, dtype=np.int64)),
            layers=self._layers(requests, sequence, positions),
        )

    def _layers(self, requests: Sequence[Request], sequence: IntArray, positions: IntArray) -> tuple[LayerPages, ...]:
        pages: dict[int, LayerPages] = {}
        for group in self._groups:
            tables = [request.blocks.tables[group.group_id] for request in requests if request.blocks is not None]
            padded, slots = self._paging(tables, sequence, positions)
            block_tables, slot_mapping = self._to_device(padded), self._to_device(slots)
            for layer_idx in group.layer_indices:
                pages[layer_idx] = LayerPages(self._caches[layer_idx], block_tables, slot_mapping)
        return tuple(pages[layer_idx] for layer_idx in range(len(pages)))

    def _paging(
        self, tables: Sequence[BlockTable], sequence: IntArray, positions: IntArray
    ) -> tuple[npt.NDArray[np.int32], IntArray]:
        """Return the sequences' blocks, padded to a rectangle, and each token's slot."""
        padded = np.full((len(tables), max(len(table.block_ids) for table in tables)), ABSENT, dtype=np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table.block_ids)] = np.frombuffer(table.block_ids, dtype=np.int32)
        writable = padded.copy()
        for row, table in zip(writable, tables, strict=True):
            row[table.adopted] = ABSENT
        blocks = writable[sequence, positions // self._block_size].astype(np.int64)
        slots = np.where(blocks == ABSENT, ABSENT, blocks * self._block_size + positions % self._block_size)
        return padded, slots

    def _to_device(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
