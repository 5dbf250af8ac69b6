"""Step details: what is written is read back, what is absent is None, and what cannot be read is one sentence."""

from typing import Any

from parbench.bench.results.details import (
    Calls,
    Communication,
    Component,
    Details,
    Idle,
    Loads,
    Pipeline,
    Ran,
    read,
)
from parbench.bench.results.records import Record, encode
from tests.support.reports_fixtures import ok_record, pipeline_details, step_case


def with_details(details: dict[str, Any]) -> Record:
    record = ok_record(step_case(), details=details)
    encode(record)
    return record


def test_each_kind_is_read_back_as_it_was_written_and_keeps_to_its_keys() -> None:
    calls = (Calls(axis="dp", op="all_reduce", num_bytes=8, ranks=2, count=3),)
    kinds: dict[str, Details] = {
        "comm_calls plain_step_seconds": Communication(comm_calls=calls, plain_step_seconds=0.5),
        "expert_load rank_load": Loads(expert_load=[[1, 2]], rank_load=[[3]]),
        "pipeline": Pipeline(
            schedule="gpipe",
            ranks=1,
            microbatches=1,
            chunks=1,
            stages_by_rank=((0,),),
            measured=((Ran("0F0", 0, 5),),),
            idle=(Idle(0, 5, 9, "rest"),),
        ),
    }
    for keys, told in kinds.items():
        assert " ".join(told.as_details) == keys
        record = with_details({**told.as_details, "other": 1})
        assert [read(record, type(told)), *(read(record, kind) for kind in _others(told))] == [
            told,
            None,
            None,
        ]
    assert told.as_details["pipeline"]["measured"] == [[["0F0", 0, 5]]]
    assert "clock" not in told.as_details["pipeline"]  # what is unknown has no key


def _others(told: Details) -> list[type[Details]]:
    return [kind for kind in (Communication, Loads, Pipeline) if not isinstance(told, kind)]


def test_what_cannot_be_read_is_a_sentence_that_names_the_case_and_the_key() -> None:
    told = read(with_details({"pipeline": pipeline_details(ranks=2) | {"chunks": "two"}}), Pipeline)
    start = f"{step_case().label}: its details of pipeline cannot be read: "
    assert told == f"{start}Expected `int`, got `str` - at `$.chunks`."


def test_a_prediction_is_off_by_what_it_exceeds_the_measurement() -> None:
    errors = [
        Component(name="a", predicted=3.0, measured=value, unit="s").error
        for value in (2.0, 0.0, None)
    ]
    assert errors == [0.5, None, None]
