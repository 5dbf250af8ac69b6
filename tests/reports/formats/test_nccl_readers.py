"""The text in nccl-tests' layout by the rules of tools that read it: each column has the number of its record."""

import pytest

from parbench.bench.plan.cases import Case
from parbench.bench.plan.catalogue import IN_PLACE, OUT_OF_PLACE, OperationSpec, names_of
from parbench.reports.formats.import_nccl import parse_nccl
from parbench.reports.formats.nccl_tests import render_text
from tests.support.reports_fixtures import collective_case, make_plan, make_run, ok_record

SIZES = (1 << 20, 1 << 22)
NUMBERS = {"time": 1e6, "algbw": 1e-9, "busbw": 1e-9}
PLACED = (OUT_OF_PLACE, IN_PLACE)
Read = dict[int, list[float]]


def as_superbench_reads(text: str, *, in_place: bool) -> Read:
    """Columns by the heading's words, counted from the line's end; lines that begin with a digit (cuda_nccl_bw)."""
    lines = text.splitlines()
    begin = max(i for i, line in enumerate(lines) if "out-of-place" in line)
    lines = lines[
        begin + 1 : max(i for i, line in enumerate(lines) if "Out of bounds values" in line)
    ]
    words = next(line for line in lines if "time" in line and "busbw" in line)[1:].split()
    backwards = words[::-1].index
    columns = [
        -1 - backwards(word) if in_place else words.index(word) - len(words) for word in NUMBERS
    ]
    rows = [line.split() for line in lines if line.strip()[:1].isdigit()]
    return {
        int(row[words.index("size")]): [float(row[column]) for column in columns] for row in rows
    }


def as_cloudai_reads(text: str, *, in_place: bool) -> Read:
    """Lines of 13 words that begin with a digit, where all six numbers are numbers (its nccl_test report)."""
    rows = [
        words
        for line in text.splitlines()
        if line.strip()[:1].isdigit() and len(words := line.split()) == 13
    ]
    numbers = {int(row[0]): [float(row[at]) for at in (5, 6, 7, 9, 10, 11)] for row in rows}
    return {size: found[3:] if in_place else found[:3] for size, found in numbers.items()}


def case_of(operation: OperationSpec, size: int, placed: str) -> Case:
    more = {"placement": placed} if len(operation.placements) > 1 else {}
    return collective_case(operation.short_name, size, mode="pipelined", **more)


def test_readers_find_the_records_numbers_of_every_operation_in_every_column() -> None:
    assert len(names_of("nccl-tests")) == 11
    for program, operation in names_of("nccl-tests").items():
        asked = [(size, placed) for size in SIZES for placed in operation.placements]
        records = {
            (size, placed): ok_record(
                case_of(operation, size, placed), seconds=size / (3 + i) * 1e-9
            )
            for i, (size, placed) in enumerate(asked)
        }
        text = render_text(
            make_run(make_plan([one.case for one in records.values()]), records.values())
        )
        assert f"# Collective test starting: {program}\n" in text
        for reader in (as_superbench_reads, as_cloudai_reads):
            for placed in PLACED:
                found = reader(text, in_place=placed == IN_PLACE)
                assert list(found) == list(SIZES), (program, reader)
                where = placed if placed in operation.placements else operation.placements[0]
                for size, numbers in found.items():
                    metrics = records[size, where].metrics
                    told = [scale * (metrics[name].value or 0) for name, scale in NUMBERS.items()]
                    assert numbers == pytest.approx(told, rel=2e-3), (program, placed)
        told_of = [
            line.partition(" repeats ")[0] for line in text.splitlines() if " repeats " in line
        ]
        assert told_of == [
            f"# {p.replace('_', '-')}" for p in PLACED if p not in operation.placements
        ]
        ours = {
            (one.params["size_bytes"], one.params["placement"]): one
            for one in parse_nccl(text, "f", None).found
        }
        assert ours.keys() == records.keys(), "what is repeated was not measured"
        for key, record in records.items():
            assert ours[key].metrics["time"].value == pytest.approx(
                record.metrics["time"].value, rel=2e-3
            )
            assert ours[key].check.passed
