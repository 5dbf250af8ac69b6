"""Where a run's time went, launch by launch, and which launch its host disturbed."""

from msgspec.structs import replace

from parbench.bench.machine.host_load import HostLoad
from parbench.bench.results.runs import LaunchInfo, Run
from parbench.reports.analysis.analysis import analyse
from parbench.reports.analysis.ranks import disturbed_words, launches_of, measuring_words
from parbench.reports.analysis.summary import summarize
from parbench.reports.analysis.verdicts import verdicts
from parbench.reports.report import Section
from parbench.reports.sections.nodes import launch_section
from parbench.reports.sections.one_run import report_of
from tests.support.reports_fixtures import collective_case, make_plan, make_run, ok_record

CASE = collective_case()
CALM, BUSY = (
    HostLoad(cores=2, one_minute=0.5, other_cores=cores, steal_percent=0.0) for cores in (0.1, 1.6)
)


def run(*launches: LaunchInfo) -> Run:
    records = [ok_record(CASE, launch, seconds=1e-3 * 2**launch) for launch in range(3)]
    made = make_run(
        make_plan([CASE], launches=3), [replace(record, seconds=1.5) for record in records]
    )
    return replace(made, info=replace(made.info, launches=launches))


def section_of(*launches: LaunchInfo) -> Section | None:
    found = run(*launches)
    return launch_section(analyse(found, summarize(found)))


def test_the_share_that_measured_is_told_and_of_older_runs_the_time() -> None:
    once = LaunchInfo(launch=0, seconds=5.0)
    assert measuring_words(run(once, replace(once, launch=1))) == "measuring 45 % of 10 s"
    assert measuring_words(run()) == "measuring took 4 s"
    assert section_of() is None
    told = "Measuring 90 % of 5 s: cases prepared, warmed up, timed and checked; the rest started and ended ranks."
    assert told in report_of(run(once)).footnotes
    assert not any("Measuring" in sentence for sentence in report_of(run()).footnotes)


def test_ranks_that_were_started_again_belong_to_their_launch_with_the_load_of_the_longest() -> (
    None
):
    parts = (
        LaunchInfo(launch=1, seconds=2.0, load=CALM),
        LaunchInfo(launch=1, seconds=4.0, load=BUSY),
    )
    first, second = launches_of(run(LaunchInfo(launch=0, seconds=3.0), *parts))
    assert (first.number, first.seconds, first.measuring_seconds, first.load) == (1, 3.0, 1.5, None)
    assert (second.number, second.seconds, second.measuring_seconds, second.load) == (
        2,
        6.0,
        1.5,
        BUSY,
    )


def test_the_launch_that_was_disturbed_most_is_named_where_launches_scatter() -> None:
    loads = CALM, BUSY, replace(BUSY, other_cores=0.9)
    for number, words in (
        (1, ""),
        (2, "in launch 2 other processes kept 1.6 of 2 cores busy"),
        (3, "in launch 2 other processes kept 1.6 of 2 cores busy (much in 2 of 3)"),
    ):
        infos = [
            LaunchInfo(launch=i, seconds=5.0, load=load) for i, load in enumerate(loads[:number])
        ]
        found = run(*infos)
        assert disturbed_words(found) == words
        assert verdicts(found, summarize(found))[-1].told.endswith(
            f": {words}" if words else "in 1 of 1 case"
        )
