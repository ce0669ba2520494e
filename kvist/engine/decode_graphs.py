"""Decode steps as CUDA graphs: one launch a step instead of hundreds, which are what limits small batches on a GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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

    @torch.inference_mode()
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
        self._plan, self._tensors = plan, tensors
        self._input = to_device(padding_batch(largest, 0, table_widths), plan, tensors)
        self._sizes = [size for size in (1, 2, 4) if size < largest]
        self._sizes += [*range(8, largest, 8), largest]
        self._replays: dict[int, Compute] = {}
        for size in reversed(self._sizes):  # the largest first: the others reuse its memory
            self._replays[size] = capture(partial(model, _first_rows(self._input, size)))

    def run(self, batch: HostBatch, drawn: torch.Tensor | None) -> torch.Tensor | None:
        """Return the logits of a step's `logit_rows`, or None for a step that has prefills or is too large.

        `drawn` as in `to_device`.
        """
        num_seqs = len(batch.seq_lens)
        is_shared = all(group.is_shared for group in batch.groups)
        if num_seqs > self._sizes[-1] or batch.num_decodes < num_seqs or not is_shared:
            return None
        size = self._sizes[bisect_left(self._sizes, num_seqs)]
        step = to_device(batch, self._plan, self._tensors, drawn)
        self._fill(step, num_seqs, size)
        return self._replays[size]()[step.logit_rows]

    def _fill(self, step: ForwardBatch, num_seqs: int, size: int) -> None:
        """Copy a step into the first rows of the graphs' input, and make padding of the rows behind it."""
        own = self._input
        pairs = [(own.input_ids, step.input_ids), (own.positions, step.positions), (own.seq_lens, step.seq_lens)]
        for group in self._plan.groups:
            to, pages = (each.layers[group.layer_indices[0]] for each in (own, step))
            pairs.append((to.block_tables[:, : pages.block_tables.shape[1]], pages.block_tables))
            pairs += [(to.page_offsets, pages.page_offsets), (to.slot_mapping, pages.slot_mapping)]
            to.slot_mapping[num_seqs:size] = ABSENT
        own.seq_lens[num_seqs:size] = 0
        for target, rows in pairs:
            target[:num_seqs].copy_(rows)


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
