"""Decode steps as CUDA graphs: one launch a step instead of hundreds, which is what bounds small batches on a GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvist.engine.batch import ForwardBatch, HostBatch, LayerPages
from kvist.engine.models.transformer import CausalLM
from kvist.kvcache import ABSENT, WindowPlan
from kvist.kvcache.tensors import KvTensors

Compute = Callable[[], torch.Tensor]

MAX_CAPTURED_SEQS = 256  # larger batches are bound by their work, not by launching it, and each size costs a capture


def cuda_graph_capture(device: torch.device) -> Callable[[Compute], Compute]:
    """Return a function that captures what its argument launches on the device, and returns the replay.

    A replay gives the same tensor each time and synchronises nothing. All graphs share one stream and so one pool of
    memory: what one gave is valid until another is replayed.
    """
    with torch.cuda.device(device):
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()  # type: ignore[no-untyped-call]

    def capture(compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device):  # or work for another device than the current one is not in the graph
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
    """Runs steps of decodes alone; each batch size that was captured serves the smaller ones, padded.

    A padded row is a sequence of no tokens: it writes nothing, sees nothing, and its logits are dropped. The model must
    launch the same work whatever the tokens are. `table_widths` has the most local blocks of each group's sequences.
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
        self._buffers = _Buffers(plan, tensors, table_widths, largest)
        self._sizes = [size for size in (1, 2, 4) if size < largest]
        self._sizes += [*range(8, largest, 8), largest]
        self._replays: dict[int, Compute] = {}
        for size in reversed(self._sizes):  # the largest first: the others reuse its memory
            self._replays[size] = capture(partial(model, self._buffers.batch(size)))

    def run(self, batch: HostBatch) -> torch.Tensor | None:
        """Return the logits of a step's wanted rows, or None for a step that is not decodes alone or is too large."""
        num_seqs = len(batch.seq_lens)
        is_shared = all(group.is_shared for group in batch.groups)
        if num_seqs > self._sizes[-1] or batch.num_decodes < num_seqs or not is_shared:
            return None
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        self._buffers.fill(batch, size)
        logits = self._replays[size]()
        return logits[torch.from_numpy(batch.logit_rows).to(logits.device)]


class _Buffers:
    """All tensors that captured graphs read, which do not keep them alive: filled anew for each step, never moved."""

    def __init__(self, plan: WindowPlan, tensors: KvTensors, table_widths: Sequence[int], max_num_seqs: int) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=tensors.device)

        self._plan, self._tensors = plan, tensors
        self._input_ids = zeros(max_num_seqs, dtype=torch.int64)
        self._positions = zeros(max_num_seqs, dtype=torch.int64)
        self._seq_lens = zeros(max_num_seqs, dtype=torch.int32)
        self._prefill_start_loc = zeros(1, dtype=torch.int32)
        self._logit_rows = torch.arange(max_num_seqs, device=tensors.device)
        self._block_tables = [zeros(max_num_seqs, width, dtype=torch.int32) for width in table_widths]
        self._page_offsets = [zeros(max_num_seqs, dtype=torch.int32) for _ in table_widths]
        self._slot_mappings = [zeros(max_num_seqs, dtype=torch.int64) for _ in table_widths]

    def batch(self, size: int) -> ForwardBatch:
        layers = []
        for layer_idx, place in enumerate(self._plan.places):
            table, offsets = self._block_tables[place.group_id], self._page_offsets[place.group_id]
            slots = self._slot_mappings[place.group_id]
            layers.append(LayerPages(self._tensors.by_slot(layer_idx), table[:size], offsets[:size], slots[:size]))
        return ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=self._positions[:size],
            seq_lens=self._seq_lens[:size],
            num_decodes=size,
            prefill_start_loc=self._prefill_start_loc,
            logit_rows=self._logit_rows[:size],
            layers=tuple(layers),
        )

    def fill(self, batch: HostBatch, size: int) -> None:
        """Copy a step's rows in; the rest of the first `size` become sequences of no tokens."""
        _copy(self._input_ids, batch.input_ids, size, 0)
        _copy(self._positions, batch.positions, size, 0)
        _copy(self._seq_lens, batch.seq_lens, size, 0)
        for group_id, group in enumerate(batch.groups):
            table = group.block_tables[0]
            _copy(self._block_tables[group_id][:, : table.shape[1]], table, size, ABSENT)
            _copy(self._page_offsets[group_id], group.page_offsets, size, 0)
            _copy(self._slot_mappings[group_id], group.slot_mapping[0], size, ABSENT)


def _copy(target: torch.Tensor, rows: npt.NDArray[Any], size: int, filler: int) -> None:
    padding = [(0, size - len(rows)), *[(0, 0)] * (rows.ndim - 1)]
    target[:size].copy_(torch.from_numpy(np.pad(rows, padding, constant_values=filler)))
