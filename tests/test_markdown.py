"""The report as Markdown: the page's tables, in GitHub's dialect, and nothing of a record that becomes markup."""

import re

import pytest
from reports_fixtures import HOSTILE, bad, collective, curve_records, make_plan, make_run, ok, sample_run, step

from bench.records import Record
from reports.markdown import escaped, render_markdown, render_several_markdown
from reports.several import several
from reports.several_sections import several_sections
from reports.summary import summarize


def markdown_of(*records: Record) -> str:
    run = make_run(make_plan([record.case for record in records]), records)
    return render_markdown(run, summarize(run))


def tables(text: str) -> list[list[str]]:
    return [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]


def test_verdicts_come_first() -> None:
    run = sample_run()
    text = render_markdown(run, summarize(run))
    assert text.startswith("# parbench run-1\n\n**a result is wrong: 53 ok")
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings == [
        *("Wrong, hung or failed", "Slow or noisy", "Not measured", "Communication", "Steps", "How it was measured"),
    ]


def test_every_line_of_a_table_has_as_many_cells() -> None:
    run = sample_run()
    found = tables(render_markdown(run, summarize(run)))
    assert len(found) >= 5
    for lines in found:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_a_table_says_what_the_page_says() -> None:
    text = markdown_of(ok(collective()))
    assert "| all_reduce | 1K | 1.00 ms \\[0.900, 1.10\\] |" in text
    assert "| --- | ---: |" in text
    assert "* **busbw**: Bus bandwidth" in text


def test_notes_stand_below_their_table() -> None:
    assert "\n\nFits: " in markdown_of(*curve_records())


@pytest.mark.parametrize("evil", [HOSTILE, "a|b", "line\n# heading", "`code`", "[x](javascript:1)", "\u202eevil"])
def test_hostile_text_is_shown_as_text(evil: str) -> None:
    text = markdown_of(bad(collective(), reason=evil), ok(step(), notes=[evil]))
    assert "<script" not in text
    assert "\n# heading" not in text
    assert "[x](" not in text
    assert "\u202e" not in text
    for lines in tables(text):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_escaping_is_undone_by_reading() -> None:
    plain = "a*b [c] `d` <e> & f|g~h#i \\ all_reduce"
    unescaped = re.sub(r"\\([\\`*\[\]|~#])", r"\1", escaped(plain))
    assert unescaped.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&") == plain


def test_several_runs_are_told_the_same_way() -> None:
    runs = [make_run(make_plan([step()]), [ok(step(), seconds=seconds)]) for seconds in (1e-3, 2e-3)]
    found = several([(run, summarize(run)) for run in runs])
    text = render_several_markdown(found, several_sections(found))
    assert text.startswith("# parbench: 2 runs\n\n**fine: all 2 runs**")
    assert "| ddp | 1.00 ms" in text
