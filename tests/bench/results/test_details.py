"""Details of steps in records."""

from typing import Any

import pytest

from parbench.bench.results.details import (
    CommunicationDetails,
    CountedCall,
    Details,
    PipelineDetails,
    TimedAction,
    read_details,
)
from parbench.bench.results.records import Record, encode_record
from parbench.bench.text import UserError
from tests.support.reports.reports_fixtures import ok_record, pipeline_details, step_case

KINDS = (CommunicationDetails, PipelineDetails)
CALLS = CountedCall(axis="dp", op="all_reduce", num_bytes=8, ranks=2, count=3)
PIPELINE = PipelineDetails(
    schedule="gpipe",
    ranks=1,
    microbatches=1,
    virtual_stages=1,
    stages_by_rank=((0,),),
    measured=((TimedAction("0F0", 0, 5),),),
)


def make_record(details: dict[str, Any]) -> Record:
    record = ok_record(step_case(), details=details)
    encode_record(record)  # which fails for details that JSON cannot hold
    return record


@pytest.mark.parametrize(
    "details",
    [
        CommunicationDetails(comm_calls=(CALLS,)),
        PIPELINE,
    ],
)
def test_details_read_back_as_written(details: Details) -> None:
    record = make_record({**details.as_details, "other": 1})
    for kind in KINDS:
        expected = details if isinstance(details, kind) else None
        assert read_details(record, kind) == expected


def test_damaged_details_name_case_and_key() -> None:
    record = make_record({"pipeline": pipeline_details(ranks=2) | {"virtual_stages": "two"}})
    with pytest.raises(UserError, match=r"`\$\.virtual_stages`") as error:
        read_details(record, PipelineDetails)
    assert step_case().label in str(error.value)
