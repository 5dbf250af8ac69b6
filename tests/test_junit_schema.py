"""A comparison's JUnit XML is what Jenkins' own schema accepts, and that schema does refuse."""

import junit_schema
import pytest
import xmlschema
from compare_fixtures import compared, launches, run_of
from reports_fixtures import HOSTILE, bad
from test_compare_formats import everything

from reports.comparing.compare import Comparison, compare
from reports.comparing.compare_formats import as_junit
from reports.comparing.compare_rule import Rule


@pytest.fixture(scope="module")
def schema() -> xmlschema.XMLSchema:
    return xmlschema.XMLSchema(junit_schema.schema_source())


def changed() -> Comparison:
    older, newer = (run_of(launches(), {"versions": {"torch": version}}) for version in ("2.12", HOSTILE))
    return compare(older, newer, Rule())


def test_every_verdict_is_accepted(schema: xmlschema.XMLSchema) -> None:
    failed = compared(launches(), [bad(launches()[0].case, 0, "failed", HOSTILE)])
    for found in (everything(), changed(), failed):
        schema.validate(as_junit(found))


@pytest.mark.parametrize(
    ("good", "broken"),
    [
        ("failure", "failed"),
        ("<testcase classname", "<testcase class"),
        (' errors="', ' broken="'),
        ("property", "prop"),
    ],
)
def test_what_is_broken_is_refused(schema: xmlschema.XMLSchema, good: str, broken: str) -> None:
    text = as_junit(everything())
    assert good in text
    with pytest.raises(xmlschema.XMLSchemaValidationError):
        schema.validate(text.replace(good, broken))
