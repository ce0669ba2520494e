import json
import os
import subprocess
import sys
from pathlib import Path

# Shared memory a block may use (CUDA C++ Programming Guide, compute capabilities): 163 and 227 KiB.
SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024}


def test_every_kernel_compiles_for_sm_80_and_sm_90_without_spilling():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    print(run.stdout)  # `pytest -s` shows it
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(reports) == 2 * 15
    for report in reports:
        assert report["spilled_bytes"] == 0, report
        assert report["shared_bytes"] <= SHARED_BYTES[report["target"]], report
