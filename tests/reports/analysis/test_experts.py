"""Expert-parallel steps: loads by layer and rank, routing against capacity, their tables, and the report's section."""

from typing import Any

import msgspec
from report_rows import cells_of, found_in, rows_of, run_of, there
from report_rows import told as line_of
from reports_fixtures import EXPERT_LOADS, ep, mixture_record, ok, step, step_metrics

from parbench.bench.plan.cases import make_case
from parbench.bench.results.records import Record
from parbench.reports.analysis.experts import Mixture, atlases, distinct, mixtures, read_mixture, shares
from parbench.reports.analysis.summary import unreadable
from parbench.reports.render.terminal import render_text
from parbench.reports.sections.experts import atlas_columns, claims, experts_section, mixture_columns, share_columns
from parbench.reports.sections.one_run import report_of


def read(*records: Record) -> tuple[Mixture, ...]:
    return mixtures(rows_of(*records))


def one_of(record: Record) -> Mixture:
    (found,) = read(record)
    return found


def layered(loads: list[list[int]], ranks: list[list[int]] | None = None) -> Record:
    return mixture_record(expert_load=loads, rank_load=ranks or [[1, 2]] * len(loads))


def test_a_step_says_its_scope_routing_and_claim() -> None:
    one = one_of(mixture_record("ep_dispatch", "zipf", 1.25))
    told = (one.scope, one.routing, one.capacity, one.ep, one.variant, one.experts)
    assert told == ("ep_dispatch", "zipf", 1.25, 2, "all_to_all", 8)
    assert one.claim == "ep_dispatch: what it may claim"
    assert one_of(mixture_record(capacity=0.0)).capacity is None


def test_each_rank_has_its_own_experts_over_all_their_copies() -> None:
    first, second = shares(read(mixture_record(routing="hot_rank")))
    assert (first.rank, first.first_expert, first.chosen, first.of_mean) == (0, 0, [192] * 4, 1.5)
    assert (second.rank, second.first_expert, second.chosen, second.of_mean) == (1, 4, [64] * 4, 0.5)
    assert [one.kept for one in shares(read(mixture_record(rank_load=[[100, 200, 30, 40]])))] == [130, 240]
    (share,) = shares([alone := one_of(mixture_record(axes={}))])  # without an axis one rank has all experts
    assert (alone.ep, share.chosen) == (1, list(EXPERT_LOADS["balanced"]))
    assert [one.of_mean for one in shares(read(layered([[0] * 8], [[0, 0]])))] == [None, None]


def test_layers_that_are_alike_are_shown_once() -> None:
    load = EXPERT_LOADS["zipf"]
    alike = one_of(layered([load] * 3))
    assert (alike.layers, len(shares([alike]))) == ((0,), 2)
    assert one_of(layered([load, load[::-1]])).layers == (0, 1)
    assert one_of(layered([load] * 2, [[1, 2], [2, 1]])).layers == (0, 1)  # other pairs were dropped


def test_capacity_changes_no_choice_but_scope_and_routing_do() -> None:
    asked = [("zipf", 0.0), ("zipf", 1.25), ("hot_rank", 1.25)]
    found = distinct(read(*(mixture_record("ep_layer", *one) for one in asked), mixture_record("ep_step", "zipf")))
    told = [(one.scope, one.routing, one.capacity) for one in found]
    assert told == [("ep_layer", "zipf", None), ("ep_layer", "hot_rank", 1.25), ("ep_step", "zipf", None)]


def test_other_steps_are_none_and_facts_that_contradict_themselves_are_told() -> None:
    (row,) = rows_of(ok(step()))
    assert (read_mixture(row), mixtures([row]), unreadable([row], read_mixture)) == (None, (), ())
    assert experts_section(found_in(ok(step()))) is None
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rank_load": [[1, 2], [1, 2]]}, "layers of expert_load(1) != layers of rank_load(2)"),
        ({"expert_load": [], "rank_load": []}, "or there are none"),
        ({"expert_load": [[1] * 7]}, "experts(7) % ep(2) != 0"),
        ({"rank_load": [[1, 2, 3]]}, "ranks(3) % ep(2) != 0"),
        ({"expert_load": [[1] * 8, [1] * 6], "rank_load": [[1, 2]] * 2}, "layers differ in experts or ranks"),
        ({"expert_load": [["many"] * 8]}, "Expected `int`, got `str`"),
        ({"axes": {"ep": {"ranks": 0}}}, "% ep(0) != 0"),
    ]
    for changed, words in cases:
        record = ok(ep(), details={**mixture_record().details, **changed})
        section = there(experts_section(found_in(record)))
        assert (section.tables, mixtures(rows_of(record))) == ((), ()), words
        (told,) = section.notes
        assert told.startswith(f"{record.case.label}: its "), words
        assert words in told


def test_a_step_says_all_it_knows() -> None:
    one = one_of(mixture_record("ep_step", "zipf", 1.25, 0.02))
    assert line_of(mixture_columns([one]), one) == (
        "scope: ep_step | routing: zipf | capacity: 1.25 | EP: 2 | variant: all_to_all | "
        "step time, within this launch: 20.0 ms [18.0, 22.0] | rank load: 1.35 | expert load: 2.95 | dropped: 12.5 % | "
        "expected: 12.5 % | dispatch GB/s: 1.00 | "
        "dispatch GB/s (logical): 2.00 | combine GB/s: 1.00 | combine GB/s (logical): 2.00 | "
        "imbalance time: 4.00 ms | slow-down, within this launch: 1.25x [1.20x, 1.30x] | bytes ratio: 1.000 | "
        "exposed ep: 8.00 ms"
    )
    assert all(column.help for column in mixture_columns([one]))
    found = read(mixture_record(), mixture_record(routing="zipf"), mixture_record("ep_step"))
    assert claims(found) == ("ep_layer: what it may claim", "ep_step: what it may claim")


def test_what_nobody_knows_has_no_column_and_dashes_beside_others() -> None:
    bare = ok(ep(), metrics=step_metrics(0.5), details=mixture_record().details)
    (alone,) = read(bare)
    cells = cells_of(mixture_columns([alone]), alone)
    assert list(cells) == ["scope", "routing", "capacity", "EP", "variant", "step time, within this launch"]
    both = read(bare, mixture_record(routing="zipf"))
    assert cells_of(mixture_columns(both), both[0])["dropped"] == "-"


def test_each_rank_says_who_is_chosen() -> None:
    lines = shares(read(mixture_record(routing="zipf")))
    assert line_of(share_columns(lines), lines[1]) == (
        "step: ep_layer | capacity: dropless | rank: 1 | experts: 4 to 7 | chosen: 690 | of mean: 1.35 | "
        "kept: 690 | by expert: 190 46 76 378"
    )
    assert all(column.help for column in share_columns(lines))
    load = list(range(8))
    for other, layers in ((load, ["all", "all"]), (load[::-1], ["0", "0", "1", "1"])):
        lines = shares(read(layered([load, other])))
        assert [cells_of(share_columns(lines), one)["layer"] for one in lines] == layers
    # many are told by their least and most, and one by its number alone
    for experts, title, text in ((list(range(64)), "by expert", "32 to 63"), ([5, 7], "experts", "1")):
        lines = shares(read(mixture_record(expert_load=[experts])))
        assert cells_of(share_columns(lines), lines[1])[title] == text


def four(scope: str = "ep_layer") -> list[Record]:
    cells = (("balanced", 1.25, 0.02), ("balanced", 0.0, 0.03), ("zipf", 1.25, 0.04), ("zipf", 0.0, 0.05))
    return [mixture_record(scope, *cell) for cell in cells]


def with_ep(record: Record, ranks: int, **params: Any) -> Record:
    case = make_case(record.case.name, record.case.target, {**record.case.params, "ep": ranks, **params})
    details = {**record.details, "axes": {"ep": {"ranks": ranks}}}
    return msgspec.structs.replace(record, case=case, details=details)


def test_each_scope_model_and_world_has_an_atlas_of_its_own() -> None:
    found = atlases(read(*four(), *four("ep_step")))
    assert [one.title for one in found] == ["Routing x capacity: ep_layer", "Routing x capacity: ep_step"]
    assert (found[0].routings, found[0].places) == (("balanced", "zipf"), ((None, 2), (1.25, 2)))
    assert [found[0].name_of(place) for place in found[0].places] == ["dropless", "capacity 1.25"]
    (atlas,) = atlases(read(*(with_ep(record, ranks) for record in four() for ranks in (1, 2))))
    names = [atlas.name_of(place) for place in atlas.places]
    assert names == ["dropless, EP 1", "capacity 1.25, EP 1", "dropless, EP 2", "capacity 1.25, EP 2"]
    found = atlases(read(*(with_ep(record, 2, experts=n) for record in four() for n in (8, 16))))
    assert [one.title for one in found] == [f"Routing x capacity: ep_layer, experts={n}" for n in (8, 16)]
    hot = mixture_record("ep_layer", "hot_rank")
    hot = msgspec.structs.replace(hot, world=msgspec.structs.replace(hot.world, size=8))
    assert [one.routings for one in atlases(read(*four(), hot))] == [("balanced", "zipf")]
    assert atlases(read(*four()[:2])) == ()  # of one routing


def test_cells_say_time_slow_down_and_drops_and_a_dash_where_none_ran() -> None:
    (atlas,) = atlases(read(*four()))
    columns = atlas_columns(atlas)
    assert [[column.text(routing) for column in columns] for routing in atlas.routings] == [
        ["balanced", "30.0 ms [27.0, 33.0]", "-", "0 %", "20.0 ms [18.0, 22.0]", "-", "12.5 %"],
        [
            "zipf",
            "50.0 ms [45.0, 55.0]",
            "1.25x [1.20x, 1.30x]",
            "0 %",
            "40.0 ms [36.0, 44.0]",
            "1.25x [1.20x, 1.30x]",
            "12.5 %",
        ],
    ]
    assert all(column.help for column in columns)
    (atlas,) = atlases(read(*four()[:3]))
    assert atlas.value("zipf", (None, 2), "time") is None
    assert [column.text("zipf") for column in atlas_columns(atlas)][1:3] == ["-", "-"]


def test_panels_come_in_order_with_their_claims_and_loads_in_full_alone() -> None:
    both = [mixture_record("ep_layer", "balanced"), mixture_record("ep_layer", "zipf", 1.25)]
    section = there(experts_section(found_in(*both, mixture_record("ep_layer", "zipf"))))
    assert len(section.tables[-1].rows) == 4  # each routing once, two ranks each
    assert [table.id for table in section.tables] == ["experts-table", "experts-atlas-1", "experts-load"]
    assert section.tables[0].notes == section.tables[1].notes == ("ep_layer: what it may claim",)
    alone = there(experts_section(found_in(both[0])))
    assert [table.id for table in alone.tables] == ["experts-table", "experts-load"]
    run = run_of(*both)
    text = render_text(report_of(run))
    for expected in ("Expert parallelism\n", "Routing x capacity: ep_layer", "Tokens per expert"):
        assert expected in text
