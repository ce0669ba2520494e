import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Shared memory a block may use (CUDA C++ Programming Guide, compute capabilities): 163 and 227 KiB.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}
SPILLED_BYTES = 72  # ten registers of 255, by tiles that are twice as fast as those that spill none; Triton 3.9: 18
NUM_KERNELS = 33


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles_almost_without_spilling_and_fits_into_shared_memory(capability, capfd):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    filters = ("-W", "error", "-W", "ignore:AnnAssign:DeprecationWarning")  # Triton 3.7's own on Python 3.14
    command = [sys.executable, *filters, Path(__file__).with_name("compile_kernels.py"), str(capability)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    with capfd.disabled():  # A log of the tests shows what each kernel takes, also where all is well.
        print("", *as_table(reports), sep="\n", file=sys.stderr, flush=True)
    assert len(reports) == NUM_KERNELS
    for report in reports:
        assert report["spilled_bytes"] <= SPILLED_BYTES, report
        assert report["shared_bytes"] <= SHARED_BYTES[capability], report


def as_table(reports):
    rows = [list(reports[0]), *([str(cell) for cell in report.values()] for report in reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
