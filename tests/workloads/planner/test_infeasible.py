"""A refused search names the missing memory or the broken rule, and the fewest GPUs that fit."""

from parbench.workloads.planner.candidates import SearchRequest
from parbench.workloads.planner.hardware import Hardware
from parbench.workloads.planner.infeasible import require_candidates
from parbench.workloads.planner.search import search
from tests.support import refusals
from tests.support.workloads.planner_asks import H100, make_request


def explain_search(request: SearchRequest, hardware: Hardware = H100) -> str:
    result = search(request, hardware)
    return refusals.usage_error(require_candidates, request, hardware, result)


def test_missing_memory_is_explained_with_fewest_gpus() -> None:
    message = explain_search(make_request("llama3-70b", 8, 4, schedule="1f1b", microbatch=1))
    assert "llama3-70b does not fit on 8 GPUs of 80 GB" in message
    assert "the smallest step (tp=8 with microbatch 1, checkpointing full)" in message
    assert "The fewest GPUs that fit, in powers of two, are 32" in message


def test_indivisible_batch_is_explained() -> None:
    message = explain_search(make_request("tiny", 11, 3))
    assert "no mesh of 11 GPUs allows global batch 3" in message
    assert "--global-batch 11" in message
