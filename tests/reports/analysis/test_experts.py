"""Expert-parallel steps: loads by layer and rank, routing against capacity, their tables, and the report's section."""

from typing import Any

from report_rows import cells_of, found_in, rows_of, run_of, there
from report_rows import told as line_of
from reports_fixtures import EXPERT_LOADS, ep, mixture_record, ok, step

from parbench.bench.results.records import Record
from parbench.reports.analysis.experts import Mixture, mixtures, read_mixture, shares
from parbench.reports.analysis.summary import unreadable
from parbench.reports.render.terminal import render_text
from parbench.reports.sections.experts import claims, experts_section, mixture_columns, share_columns
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


def test_section_has_the_steps_and_each_routing_once() -> None:
    both = [mixture_record("ep_layer", "balanced"), mixture_record("ep_layer", "zipf", 1.25)]
    section = there(experts_section(found_in(*both, mixture_record("ep_layer", "zipf"))))
    assert [(table.id, len(table.rows)) for table in section.tables] == [("experts-table", 3), ("experts-load", 4)]
    assert section.tables[0].notes == ("ep_layer: what it may claim",)
    text = render_text(report_of(run_of(*both)))
    for expected in ("Expert parallelism\n", "Tokens per expert"):
        assert expected in text
