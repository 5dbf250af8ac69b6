"""What ``bench/world/torch_*.py`` use of torch's private names, and the releases that changed them."""

import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.distributed import device_mesh
from torch.distributed.pipelining import PipelineStage

CP = "torch.distributed.tensor.experimental._context_parallel._attention"
PP = "torch.distributed.pipelining"
NAMES = (
    # where, name, the first release with it ("" for all that are supported)
    ("torch.distributed", "all_gather_single", "2.13"),
    ("torch.distributed", "reduce_scatter_single", "2.13"),
    ("torch.distributed", "all_gather_into_tensor", ""),
    ("torch.distributed", "reduce_scatter_tensor", ""),
    ("torch.distributed.distributed_c10d", "_coalescing_manager", ""),
    ("torch.distributed.distributed_c10d", "_resolve_process_group", ""),
    ("torch.distributed.distributed_c10d", "_world", ""),
    ("torch.distributed.distributed_c10d", "default_pg_timeout", ""),
    ("torch._C._distributed_c10d", "_create_work_from_future", ""),
    ("torch._C._distributed_c10d", "_dump_fr_trace_json", ""),
    ("torch.testing._internal.distributed.fake_pg", "FakeStore", ""),
    ("torch.distributed.tensor.debug", "_clear_sharding_prop_cache", ""),
    ("torch.distributed.tensor._redistribute", "clear_redistribute_planner_cache", ""),
    ("torch.utils._python_dispatch", "TorchDispatchMode", ""),
    ("torch.utils._pytree", "tree_leaves", ""),
    ("torch.cuda", "_sleep", ""),
    (CP, "_enable_context_parallel_dispatcher", ""),
    (CP, "_disable_context_parallel_dispatcher", ""),
    (f"{PP}._backward", "stage_backward_input", ""),
    (f"{PP}._backward", "stage_backward_weight", ""),
    (f"{PP}.schedules", "_PipelineScheduleRuntime", ""),
    (f"{PP}.schedules", "_Action", ""),
)
BASE = PipelineStage.__mro__[1]
WORDS = (
    # of torch's source: a parameter, a method, what is made with the object; the first release with it, and without
    (PipelineStage, "output_grads: ", "2.12", ""),
    (BASE, "def _get_init_p2p_neighbors_ops", "", "2.15"),
    (BASE, "self.fwd_cache: ", "", "2.15"),
    (BASE, "self._forward_chunk_states: ", "2.15", ""),
    (BASE, "self.backward_state: ", "", ""),
    (BASE, "def _retrieve_recv_grads", "", ""),
    (torch.utils.checkpoint, "respect_saved_tensors_hooks: ", "2.14", ""),
    (device_mesh, "_pg_registry: ", "", ""),
)


@pytest.mark.parametrize(("where", "name", "since"), NAMES, ids=[name for _, name, _ in NAMES])
def test_a_private_name_is_there_in_the_releases_that_have_it(where: str, name: str, since: str) -> None:
    assert hasattr(importlib.import_module(where), name) == (not since or torch.__version__ >= since)


@pytest.mark.parametrize(("where", "word", "since", "until"), WORDS, ids=[word for _, word, _, _ in WORDS])
def test_what_no_name_shows_is_in_the_source(where: Any, word: str, since: str, until: str) -> None:
    there = (not since or torch.__version__ >= since) and (not until or torch.__version__ < until)
    assert (word in inspect.getsource(where)) == there
