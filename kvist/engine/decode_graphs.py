"""Decode steps as CUDA graphs: one launch a step instead of hundreds, which are what limits small batches on a GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvist.engine.batch import ForwardBatch, HostBatch, LayerPages, padding_batch, to_device
from kvist.engine.models.transformer import CausalLM
from kvist.kvcache import ABSENT, WindowPlan
from kvist.kvcache.tensors import KvTensors

Compute = Callable[[], torch.Tensor]

MAX_CAPTURED_SEQS = 256  # larger batches are limited by their work, not by launches, and each size costs a capture


def cuda_graph_capture(device: torch.device) -> Callable[[Compute], Compute]:
    """Return a function that captures what its argument launches on the device, and returns a function that replays it.

    A replay returns the same tensor each time and does not synchronise. All graphs share one stream and one pool of
    memory: a graph's result is valid until another graph is replayed.
    """
    with torch.cuda.device(device):
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def capture(compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):  # a capture takes work on the current device alone
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                compute()  # Triton compiles and cuBLAS takes its workspace here: neither may happen in a capture.
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                result = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    return capture


class DecodeGraphs:
    """Runs steps that are decodes alone by replaying graphs; a step is padded to the next captured batch size.

    A padding row is a sequence without tokens: it writes and attends to nothing, and its logits are dropped. The model
    must launch the same work whatever the tokens are. `table_widths` has the most local blocks of each group's
    sequences. The graphs read one set of tensors, filled anew for each step and never moved.
    """

    def __init__(
        self,
        model: CausalLM,
        plan: WindowPlan,
        tensors: KvTensors,
        table_widths: Sequence[int],
        max_num_seqs: int,
        capture: Callable[[Compute], Compute],
    ) -> None:
        largest = min(max_num_seqs, MAX_CAPTURED_SEQS)
        self._groups = plan.groups
        self._input = to_device(padding_batch(largest, 0, table_widths), plan, tensors)
        self._sizes = [size for size in (1, 2, 4) if size < largest]
        self._sizes += [*range(8, largest, 8), largest]
        self._replays: dict[int, Compute] = {}
        for size in reversed(self._sizes):  # the largest first: the others reuse its memory
            self._replays[size] = capture(partial(model, _first_rows(self._input, size)))

    def run(self, batch: HostBatch) -> torch.Tensor | None:
        """Return the logits of a step's `logit_rows`, or None for a step that has prefills or is too large."""
        num_seqs = len(batch.seq_lens)
        is_shared = all(group.is_shared for group in batch.groups)
        if num_seqs > self._sizes[-1] or batch.num_decodes < num_seqs or not is_shared:
            return None
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._fill(batch, size)
        logits = self._replays[size]()
        return logits[torch.from_numpy(batch.logit_rows).to(logits.device)]

    def _fill(self, batch: HostBatch, size: int) -> None:
        """Copy a step's rows into the graphs' input; the rest of its first `size` rows become padding."""
        _copy(self._input.input_ids, batch.input_ids, size, 0)
        _copy(self._input.positions, batch.positions, size, 0)
        _copy(self._input.seq_lens, batch.seq_lens, size, 0)
        for group, pages in zip(self._groups, batch.groups, strict=True):
            layer, table = self._input.layers[group.layer_indices[0]], pages.block_tables[0]
            _copy(layer.block_tables[:, : table.shape[1]], table, size, ABSENT)
            _copy(layer.page_offsets, pages.page_offsets, size, 0)
            _copy(layer.slot_mapping, pages.slot_mapping[0], size, ABSENT)


def _first_rows(batch: ForwardBatch, size: int) -> ForwardBatch:
    """Return the first `size` sequences of a batch of decodes, in the same memory."""
    layers = (
        LayerPages(layer.cache, layer.block_tables[:size], layer.page_offsets[:size], layer.slot_mapping[:size])
        for layer in batch.layers
    )
    return replace(
        batch,
        input_ids=batch.input_ids[:size],
        positions=batch.positions[:size],
        seq_lens=batch.seq_lens[:size],
        num_decodes=size,
        logit_rows=batch.logit_rows[:size],
        layers=tuple(layers),
    )


def _copy(target: torch.Tensor, rows: npt.NDArray[Any], size: int, filler: int) -> None:
    padding = [(0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)]
    target[:size].copy_(torch.from_numpy(np.pad(rows, padding, constant_values=filler)))
