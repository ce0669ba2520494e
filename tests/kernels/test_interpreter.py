import os
import subprocess
import sys
from pathlib import Path


def test_the_triton_kernels_pass_the_tests_of_their_ops_in_the_interpreter():
    # In a process of its own: Triton decides for good when it is imported, and the engine's tests want the references.
    ops = ["write_kv", "paged_attention", "split_k"]
    modules = [f"test_{op}.py" for op in ops]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "not gpu", "-p", "no:cacheprovider", *modules],
        cwd=Path(__file__).parent,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
