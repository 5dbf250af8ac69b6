"""Routing against capacity: what belongs to one atlas, and what each of its cells says."""

from reports_fixtures import make_plan, make_run, mixture_record, ok

from bench.cases import Case
from bench.records import Record
from reports.parallel.experts import mixtures
from reports.parallel.experts_atlas import Atlas, atlas_columns, atlases, times
from reports.summary import summarize


def atlases_of(*records: Record) -> tuple[Atlas, ...]:
    return atlases(mixtures(summarize(make_run(make_plan([record.case for record in records]), records)).rows))


def four(scope: str = "ep_layer") -> list[Record]:
    return [
        mixture_record(scope, "balanced", 1.25, 0.02),
        mixture_record(scope, "balanced", 0.0, 0.03),
        mixture_record(scope, "zipf", 1.25, 0.04),
        mixture_record(scope, "zipf", 0.0, 0.05),
    ]


def with_ep(record: Record, ranks: int) -> Record:
    params = {**record.case.params, "ep": ranks}
    case = Case(id=f"{record.case.id}-{ranks}", name=record.case.name, target=record.case.target, params=params)
    details = {**record.details, "axes": {"ep": {"ranks": ranks}}}
    return ok(case, metrics=record.metrics, details=details)


def test_each_scope_has_its_own() -> None:
    found = atlases_of(*four(), *four("ep_step"))
    assert [one.title for one in found] == ["Routing x capacity: ep_layer", "Routing x capacity: ep_step"]
    assert found[0].routings == ("balanced", "zipf")
    assert found[0].places == ((None, 2), (1.25, 2))
    assert [found[0].name_of(place) for place in found[0].places] == ["dropless", "capacity 1.25"]


def test_cells_say_time_slow_down_and_drops() -> None:
    (atlas,) = atlases_of(*four())
    texts = [[column.text(routing) for column in atlas_columns(atlas)] for routing in atlas.routings]
    assert texts[0] == ["balanced", "30.0 ms [27.0, 33.0]", "-", "0 %", "20.0 ms [18.0, 22.0]", "-", "12.5 %"]
    assert texts[1] == ["zipf", "50.0 ms [45.0, 55.0]", "1.25x", "0 %", "40.0 ms [36.0, 44.0]", "1.25x", "12.5 %"]
    assert all(column.help for column in atlas_columns(atlas))


def test_what_did_not_run_is_unknown() -> None:
    (atlas,) = atlases_of(*four()[:3])
    assert atlas.value("zipf", (None, 2), "time") is None
    assert [column.text("zipf") for column in atlas_columns(atlas)][1:3] == ["-", "-"]


def test_several_expert_axes_stand_side_by_side() -> None:
    (atlas,) = atlases_of(*(with_ep(record, ranks) for record in four() for ranks in (1, 2)))
    names = [atlas.name_of(place) for place in atlas.places]
    assert names == ["dropless, EP 1", "capacity 1.25, EP 1", "dropless, EP 2", "capacity 1.25, EP 2"]


def test_one_routing_alone_is_none() -> None:
    assert atlases_of(*four()[:2]) == ()


def test_factors_have_two_decimals() -> None:
    assert (times(1.256), times(None)) == ("1.26x", "-")
