"""What do windows save: KV bytes of a sequence, slots at the peak of a prefill, and sequences in the same memory?

Nothing is timed: every figure is counted on the allocator that serves requests, after real prefills in chunks and real
decode steps, for the shapes of published models in bfloat16. The baseline is an engine without a window plan: every
layer keeps every token ("whole"). The limit is the full-attention layers, which keep all tokens on either side.

    python benchmarks/bench_kv_memory.py [--quick] [--save]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from _common import report, table

from kvist.events.engine_events import FULL, KnownWindow
from kvist.kvcache import (
    BlockHashChain,
    KvCacheManager,
    KvDtype,
    LayerKv,
    ScratchPolicy,
    SequenceBlocks,
    SharedKv,
    WindowPlan,
    block_bytes,
    plan_windows,
    split_memory,
)
from kvist.kvcache.budget import BudgetPolicy

BLOCK_SIZE, CHUNK, DECODES = 32, 2048, 64
LENGTHS = (1024, 8192, 32768, 131072)
MEMORY_BYTES, MAX_NUM_SEQS = 32 * 2**30, 512
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Shape:
    """A published model's attention layers: `pattern` repeats over the layers, the last `num_shared` store nothing."""

    name: str
    num_layers: int
    pattern: tuple[KnownWindow, ...]
    kv_heads: tuple[int, int]  # of sliding and of full layers
    head_dims: tuple[int, int]
    num_shared: int = 0

    def layers(self) -> list[LayerKv | SharedKv]:
        """Return what each layer stores."""
        windows = [self.pattern[i % len(self.pattern)] for i in range(self.num_layers)]
        num_owners = self.num_layers - self.num_shared
        layers: list[LayerKv | SharedKv] = []
        for i, window in enumerate(windows):
            if i >= num_owners:
                layers.append(SharedKv(max(j for j in range(num_owners) if windows[j] == window)))
            else:
                kind = int(window is FULL)
                layers.append(LayerKv(window, self.kv_heads[kind], self.head_dims[kind], KvDtype.BFLOAT16))
        return layers


SHAPES = [
    Shape("Llama 3 8B", 32, (FULL,), (8, 8), (128, 128)),
    Shape("Mistral 7B v0.1", 32, (4096,), (8, 8), (128, 128)),
    Shape("Gemma 3 27B", 62, (*[1024] * 5, FULL), (16, 16), (128, 128)),
    Shape("Gemma 3n E4B", 35, (*[512] * 4, FULL), (2, 2), (256, 256), num_shared=15),
    Shape("Gemma 4 26B-A4B", 30, (*[1024] * 5, FULL), (8, 2), (256, 512)),
    Shape("gpt-oss 20B", 24, (128, FULL), (8, 8), (64, 64)),
]
EXAMPLE = Shape("32 layers, window 128", 32, (128,), (8, 8), (128, 128))  # what the idea was published with


class Memory:
    """One engine's KV memory, without tensors: sequences are prefilled in chunks and decoded, nothing is computed."""

    def __init__(
        self, plan: WindowPlan, num_blocks: Sequence[int], has_scratch: bool = False, chunk: int = CHUNK
    ) -> None:
        self.plan = plan
        self._chunk = chunk
        policy = ScratchPolicy() if has_scratch else None
        self._manager = KvCacheManager(plan.groups, num_blocks, BLOCK_SIZE, has_prefix_cache=False, scratch=policy)
        self._has_scratch = has_scratch
        self.peak_slots = 0

    def prefill(self, num_tokens: int) -> SequenceBlocks | None:
        """Open a sequence and prefill it in chunks; None, and nothing held, when memory runs out on the way."""
        chain, tokens = BlockHashChain(BLOCK_SIZE), range(num_tokens)
        hit = self._manager.match(chain, tokens)
        sequence = self._manager.open(hit, chain, tokens, 0, is_scratch_allowed=self._has_scratch)
        for end in range(self._chunk, num_tokens + self._chunk, self._chunk):
            if sequence is None or not self._step(sequence, min(end, num_tokens)):
                break
        else:
            return sequence
        if sequence is not None:
            self._manager.close(sequence)
        return None

    def decode(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        """Decode a number of tokens; False when memory runs out."""
        end = sequence.num_tokens + num_tokens
        return all(self._step(sequence, reached) for reached in range(sequence.num_tokens + 1, end + 1))

    def used_bytes(self) -> int:
        """Return the bytes of all slots that sequences hold."""
        pools = self._manager.statistics().pools
        sizes = [block_bytes(group, BLOCK_SIZE) for group in self.plan.groups]
        return sum(pool.num_used * size for pool, size in zip(pools, sizes, strict=True))

    def _step(self, sequence: SequenceBlocks, num_tokens: int) -> bool:
        has_room = self._manager.grow(sequence, range(num_tokens), num_tokens)
        self.peak_slots = max(self.peak_slots, self._manager.statistics().pools[-1].num_used)
        self._manager.settle()
        return has_room


def plan_of(shape: Shape, *, is_windowed: bool = True) -> WindowPlan:
    """Return the plan of a shape; without windows, every layer that stores keeps every token."""
    layers = shape.layers()
    if not is_windowed:
        layers = [replace(layer, window=FULL) if isinstance(layer, LayerKv) else layer for layer in layers]
    return plan_windows(layers, 2 * LENGTHS[-1])


def bytes_of_one(plan: WindowPlan, num_tokens: int) -> int:
    """Return the bytes that one sequence holds, and each of its steps reads, while it decodes behind a prompt."""
    memory = Memory(plan, [num_tokens // BLOCK_SIZE + DECODES] * len(plan.groups))
    sequence = memory.prefill(num_tokens)
    assert sequence is not None
    assert memory.decode(sequence, DECODES)
    return memory.used_bytes()


def peak_slots(plan: WindowPlan, num_tokens: int, chunk: int, has_scratch: bool) -> int:
    """Return the most slots of the last group, that of the narrowest window, that one prefill takes."""
    memory = Memory(plan, [num_tokens // BLOCK_SIZE + 1] * len(plan.groups), has_scratch, chunk)
    assert memory.prefill(num_tokens) is not None
    return memory.peak_slots


def concurrency(plan: WindowPlan, num_tokens: int, policy: BudgetPolicy, has_scratch: bool = False) -> int:
    """Return how many sequences of `num_tokens` decode at once in `MEMORY_BYTES`, admitted one after the other."""
    counts = split_memory(
        plan.groups,
        BLOCK_SIZE,
        MEMORY_BYTES,
        max_model_len=num_tokens,
        max_num_seqs=MAX_NUM_SEQS,
        max_step_tokens=CHUNK,
        policy=policy,
    )
    memory = Memory(plan, counts, has_scratch)
    num_admitted = 0
    while num_admitted < MAX_NUM_SEQS:
        sequence = memory.prefill(num_tokens - 1)
        if sequence is None or not memory.decode(sequence, 1):
            break
        num_admitted += 1
    return num_admitted


def bytes_table(shapes: Sequence[Shape], lengths: Sequence[int]) -> tuple[str, list[dict[str, object]]]:
    """Compare one decoding sequence's bytes, which are also the bytes that a decode step reads of it."""
    rows, results = [], []
    for shape in shapes:
        for num_tokens in lengths:
            windowed, whole = (bytes_of_one(plan_of(shape, is_windowed=each), num_tokens) for each in (True, False))
            rows.append(
                [
                    shape.name,
                    f"{num_tokens:,}",
                    f"{windowed / MIB:,.1f}",
                    f"{whole / MIB:,.1f}",
                    f"{whole / windowed:.2f}x",
                ]
            )
            results.append({"shape": shape.name, "tokens": num_tokens, "windowed": windowed, "whole": whole})
    return table(["model", "tokens", "windowed MiB", "whole MiB", "saved"], rows), results


def slots_table(shapes: Sequence[Shape]) -> tuple[str, list[dict[str, object]]]:
    """Compare the slots of one prefill with scratch slots and without: one step, and chunks of `CHUNK`."""
    cases = [(EXAMPLE, 1024, 1024), (EXAMPLE, 1000, 1000)]
    cases += [
        (shape, 8192, chunk)
        for shape in shapes
        for chunk in (CHUNK, 8192)
        if plan_of(shape).groups[-1].window is not FULL
    ]
    rows, results = [], []
    for shape, num_tokens, chunk in cases:
        plan = plan_of(shape)
        without, scratch = (peak_slots(plan, num_tokens, chunk, each) for each in (False, True))
        saved = f"{1 - scratch / without:.2%}"
        rows.append([shape.name, f"{num_tokens:,}", f"{chunk:,}", without, scratch, saved])
        results.append(
            {"shape": shape.name, "tokens": num_tokens, "chunk": chunk, "slots": without, "scratch": scratch}
        )
    return table(["model", "prompt", "step", "slots", "with scratch", "saved"], rows), results


def concurrency_table(shapes: Sequence[Shape], num_tokens: int) -> tuple[str, list[dict[str, object]]]:
    """Compare sequences at equal memory."""
    rows, results = [], []
    for shape in shapes:
        plan, whole = plan_of(shape), plan_of(shape, is_windowed=False)
        counts = {
            "whole": concurrency(whole, num_tokens, "bounded"),
            "uniform": concurrency(plan, num_tokens, "uniform"),
            "bounded": concurrency(plan, num_tokens, "bounded"),
            "scratch": concurrency(plan, num_tokens, "bounded", has_scratch=True),
        }
        rows.append([shape.name, *counts.values(), f"{counts['bounded'] / counts['whole']:.2f}x"])
        results.append({"shape": shape.name, **counts})
    return table(["model", "whole", "uniform", "bounded", "bounded, scratch", "bounded / whole"], rows), results


def main() -> None:
    """Count everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two models and two lengths, for a look")
    parser.add_argument("--save", action="store_true", help="write the results below benchmarks/results")
    args = parser.parse_args()
    shapes, lengths = (SHAPES[2:5:2], LENGTHS[:2]) if args.quick else (SHAPES, LENGTHS)
    held, held_results = bytes_table(shapes, lengths)
    slots, slots_results = slots_table(shapes)
    admitted, admitted_results = concurrency_table(shapes, 8192)
    markdown = "\n\n".join(
        [
            f"KV bytes of one decoding sequence, all of which a step reads; blocks of {BLOCK_SIZE} tokens, bfloat16:",
            held,
            "Slots of the narrowest window's pool at the peak of one prefill (a slot holds a block of all its layers):",
            slots,
            f"Sequences of 8,192 tokens that decode at once in {MEMORY_BYTES / 2**30:.0f} GiB, admitted one by one in "
            f"chunks of {CHUNK}, at most {MAX_NUM_SEQS}:",
            admitted,
        ]
    )
    results = {"bytes": held_results, "slots": slots_results, "concurrency": admitted_results}
    report("kv_memory", markdown, results, [], args.save)


if __name__ == "__main__":
    main()
