"""A comparison as JUnit XML."""

import subprocess
import sys
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
import xmlschema

from parbench.reports.compare.compare import RunComparison
from parbench.reports.compare.junit import render_junit

PYTEST_VERSION = "9.2.0"
PYTEST_SOURCE = Path.home() / ".cache" / "parbench" / f"pytest-{PYTEST_VERSION}.tar.gz"


def read_jenkins_schema() -> str:
    """Return Jenkins' junit-10.xsd from the source of pytest, which pip fetches once."""
    if not PYTEST_SOURCE.is_file():
        folder = PYTEST_SOURCE.parent
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", f"pytest=={PYTEST_VERSION}"]
        command += ["--no-deps", "--no-binary", "pytest", "--quiet", "--dest", str(folder)]
        subprocess.run(command, timeout=300, check=True)
    with tarfile.open(PYTEST_SOURCE) as archive:
        name = f"pytest-{PYTEST_VERSION}/testing/example_scripts/junit-10.xsd"
        file = archive.extractfile(name)
        assert file is not None
        return file.read().decode()


@pytest.mark.full
def test_junit_follows_the_schema_of_jenkins(mixed: RunComparison) -> None:
    schema = xmlschema.XMLSchema(read_jenkins_schema())
    text = render_junit(mixed)
    schema.validate(text)
    assert not schema.is_valid(text.replace("failure", "failed"))


def test_junit_outcome_follows_the_verdict(mixed: RunComparison) -> None:
    root = ElementTree.fromstring(render_junit(mixed))
    outcomes = {}
    for series, case in zip(mixed.series, root.iter("testcase"), strict=True):
        assert case.get("name") == series.case.label
        outcomes[series.verdict] = [child.tag for child in case]
    assert outcomes == {
        "SLOWER": ["failure"],
        "WRONG": ["failure"],
        "MISSING": ["error"],
        "UNDECIDED": ["skipped"],
        "NEW": ["skipped"],
        "FASTER": [],
        "NO CHANGE": [],
    }
    [error] = root.iter("error")
    assert str(error.get("message")).startswith("MISSING. NEW has no result on")
