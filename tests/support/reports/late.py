"""Records of operations with a late rank, and raw samples of its arrivals."""

from parbench.bench.results.records import Record, Stragglers
from tests.support.reports.reports_fixtures import (
    collective_case,
    collective_metrics,
    ok_record,
    seconds_metric,
)


def find_stragglers(late_rank: int | None = 1) -> Stragglers:
    return Stragglers(
        method="one clock",
        uncertainty=1e-6,
        late_rank=late_rank,
        share=0.8,
        last_out_rank=0,
        last_out_share=0.6,
    )


def late_record(size: int = 1024, repetition: int = 0, skew: float | None = 50e-6) -> Record:
    case = collective_case(size_bytes=size)
    metrics = collective_metrics(case, 1e-3)
    metrics["skew"] = seconds_metric(skew)
    metrics["transfer"] = seconds_metric(9e-4)
    return ok_record(case, repetition, metrics=metrics, arrival=find_stragglers())
