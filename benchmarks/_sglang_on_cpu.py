"""Starts SGLang's server on a CPU: `PYTHON benchmarks/_sglang_on_cpu.py FLAGS`, with the python that has SGLang.

SGLang imports its package of kernels, `sgl_kernel`, whose builds are for GPUs or must be compiled for each CPU. A
package of that name takes its place, in which each name exists and raises where it is called: with
`--attention-backend torch_native` SGLang computes with torch alone, and nothing but its imports needs the package.

With `--enable-hierarchical-cache` nothing is copied to the host's memory and back, so that answers to prompts that are
hit there are arbitrary: but what is kept where, and what is hit, is SGLang's own.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

STAND_IN = '''
"""Every module and name of `sgl_kernel`, none of which can be called."""
import importlib.abc, importlib.machinery, sys, types

__version__ = "0.4.10"

def named(name):
    class Missing(types.ModuleType):
        def __call__(self, *_, **__):
            raise NotImplementedError(f"{name} is a kernel for GPUs")
        def __getattr__(self, attribute):
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            return named(f"{name}.{attribute}")
    return Missing(name)

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        is_ours = name.startswith("sgl_kernel.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_ours else None
    def create_module(self, spec):
        return named(spec.name)
    def exec_module(self, module):
        module.__path__ = []

__getattr__ = named("sgl_kernel").__getattr__
sys.meta_path.insert(0, Finder())

import builtins, torch

class Done(torch.cpu.Stream):
    """A stream whose work, or an event whose wait, is over at once."""
    def __init__(self, *_, **__):
        pass
    def __getattr__(self, name):
        return lambda *_, **__: True

torch.cpu.Stream = torch.cpu.Event = Done
torch.cpu.current_stream = Done
for name in ("transfer_kv_all_layer_lf_pf", "transfer_kv_per_layer_pf_lf"):
    setattr(builtins, name, lambda *_, **__: None)
'''

if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(prefix="sgl_kernel-"))
    (folder / "sgl_kernel.py").write_text(STAND_IN + "__path__ = []\n")
    settings = {"PYTHONPATH": str(folder), "SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(folder)  # a module of the working folder must not shadow an installed one
    os.execve(sys.executable, [sys.executable, "-m", "sglang.launch_server", *sys.argv[1:]], os.environ | settings)
