from reports_fixtures import collective, make_plan, make_run, ok, step

from bench.cases import Case, make_case
from reports.labels import differences, operation, operation_without, short_labels
from reports.summary import summarize


def labels_of(*cases: Case) -> list[str]:
    rows = summarize(make_run(make_plan(cases), [ok(case) for case in cases])).rows
    return list(short_labels(rows).values())


def test_an_operation_leaves_out_its_kind_and_what_has_an_axis() -> None:
    assert operation(collective("all_reduce")) == "all_reduce"
    assert operation(collective("broadcast", root=1)) == "broadcast root=1"
    assert operation(make_case("lonely", "m:f", {})) == "lonely"


def test_a_step_says_only_what_tells_it_apart() -> None:
    cases = [step("ddp"), step("pipeline", schedule="1f1b"), step("pipeline", schedule="gpipe")]
    assert labels_of(*cases) == ["ddp", "pipeline schedule=1f1b", "pipeline schedule=gpipe"]


def test_a_parameter_that_only_one_has_tells_it_apart() -> None:
    assert labels_of(step("ddp"), step("ddp", bucket_mb=1.0)) == ["ddp", "ddp bucket_mb=1.0"]


def test_kinds_are_named_where_there_are_several() -> None:
    assert labels_of(step("ddp"), make_case("mine.ddp", "m:f", {})) == ["step.ddp", "mine.ddp"]


def test_labels_hold_nothing_that_a_terminal_obeys() -> None:
    assert labels_of(step("a", word="\x1b[1m"), step("a", word="b")) == ["a word=\\x1b[1m", "a word=b"]


def differences_of(*cases: Case, without: tuple[str, ...] = ()) -> list[str]:
    rows = summarize(make_run(make_plan(cases), [ok(case) for case in cases])).rows
    return list(differences(rows, without).values())


def test_differences_are_the_parameters_alone_save_those_named() -> None:
    cases = [step("a", split="even", chunks=1), step("a", split="3,1", chunks=2)]
    assert differences_of(*cases) == ["split=even chunks=1", "split=3,1 chunks=2"]
    assert differences_of(*cases, without=("chunks",)) == ["split=even", "split=3,1"]
    assert differences_of(*cases, without=("chunks", "split")) == ["", ""]
    assert differences_of(step("a")) == [""]


def test_a_parameter_without_a_value_is_no_difference_worth_a_word() -> None:
    assert differences_of(step("a", split=""), step("a", split="3+1")) == ["", "split=3+1"]


def test_what_stands_elsewhere_is_left_out_of_an_operation() -> None:
    case = collective("all_reduce", group="pairs", member=1, op="sum")
    assert operation_without(case, ("group", "member")) == "all_reduce op=sum"
    assert operation_without(case, ()) == operation(case) == "all_reduce group=pairs member=1 op=sum"
