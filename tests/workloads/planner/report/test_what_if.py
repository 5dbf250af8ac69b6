"""What-if variants of a step change one thing and keep the rest."""

from parbench.workloads.planner.dry_run import dry_run
from parbench.workloads.planner.report.what_if import list_variants
from tests.support.planner_asks import H100, make_spec


def test_variants_change_one_thing() -> None:
    spec = make_spec("dp=2,pp=4,tp=8", "llama3-70b", checkpointing="selective")
    run = dry_run(spec.with_batch(64), H100)
    variants = dict(list_variants(run))
    assert variants["unchanged"].seconds == run.seconds
    assert variants["links inside nodes half as fast"].seconds > run.seconds
    assert variants["no communication hidden"].exposed_seconds > run.exposed_seconds
    assert variants["twice the batch"].spec.global_batch == 128
    assert run.seconds < variants["twice the batch"].seconds < 2 * run.seconds
    assert variants["twice the GPUs"].spec.ranks == 128
    assert variants["twice the GPUs"].spec.global_batch == 64
    assert variants["twice the GPUs and batch"].spec.global_batch == 128


def test_variants_keep_measured_links() -> None:
    spec = make_spec("fsdp=64", "llama3-70b").with_batch(64)
    run = dry_run(spec, H100, seconds=lambda call: 1e-3)
    variants = dict(list_variants(run))
    assert not any(name.startswith("links") for name in variants)
    assert "twice the GPUs" not in variants
