"""A server's import of torch leaves nothing out that is asked for later."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import gc, sys
from concurrent.futures import ThreadPoolExecutor
from octavo.commands.torch_start import collection_paused, import_torch_to_serve, load_torch_libraries

load_torch_libraries()
with collection_paused():
    assert not gc.isenabled()
    import_torch_to_serve()
assert gc.isenabled() and gc.get_freeze_count() > 10_000
import torch

for name in ("torch._meta_registrations", "torch.distributed._meta_registrations", "torch._native"):
    assert name not in sys.modules
assert torch.ones(3).sum() == 3
if torch.__version__.startswith("2.13."):  # what is left out depends on the version
    assert not {"torch.distributions.normal", "torch.optim.sgd", "torch.export.exported_program"} & set(sys.modules)

# From several threads at once, as an attribute, and by an import of a part.
with ThreadPoolExecutor(8) as threads:
    assert len(set(threads.map(lambda _: torch.distributions.Normal, range(8)))) == 1
assert torch.distributions.Normal(torch.zeros(1), torch.ones(1)).mean == 0
layer = torch.nn.Linear(2, 1)
torch.optim.SGD(layer.parameters(), lr=0.1).step()
from torch.utils.data import DataLoader
import torch.ao.quantization

assert len(DataLoader([1, 2, 3])) == 3 and torch.ao.quantization.QuantStub is not None
assert torch.export.export(layer, (torch.ones(1, 2),)) is not None

# Attributes and functions of the real module, for whoever asks for them after all.
import torch._meta_registrations

assert callable(torch._meta_registrations.meta_index_Tensor)
assert torch.nn.functional.embedding_bag(
    torch.ones(1, 2, dtype=torch.int64, device="meta"), torch.ones(4, 3, device="meta")
).shape == (1, 3)
"""


@pytest.mark.slow
def test_what_a_server_leaves_out_of_torch_can_be_imported_later() -> None:
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.slow
def test_a_servers_modules_import_no_torch_before_it_listens() -> None:
    script = "import sys, octavo.commands.serve, octavo.server.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0


def test_a_servers_modules_load_no_compiled_module_while_torchs_libraries_are_loaded() -> None:
    """The dynamic linker loads one library at a time, so that they would wait for torch's."""
    script = """
import importlib, sys
import octavo.commands.serve
from octavo.commands.torch_start import _COMPILED

for name in _COMPILED:
    importlib.import_module(name)
before = set(sys.modules)
import octavo.server.run

late = {name: getattr(sys.modules[name], "__file__", None) or "" for name in set(sys.modules) - before}
sys.exit(" ".join(name for name, file in late.items() if file.endswith(".so")) or 0)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, f"add to _COMPILED: {ran.stderr}"


def test_a_process_that_exits_while_torchs_libraries_are_loaded_does_not_crash() -> None:
    script = "from octavo.commands.torch_start import load_torch_libraries; load_torch_libraries(); raise SystemExit(7)"
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 7
