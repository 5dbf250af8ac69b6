"""A comparison as JUnit XML, which every CI shows."""

from dataclasses import asdict
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from reports import cells
from reports.regression.compare import VERDICTS, Comparison, Family, Word, world_words
from reports.regression.compare_words import effect_words, whole_words


def as_junit(comparison: Comparison) -> str:
    """Return JUnit XML as Jenkins' junit-10.xsd takes it: properties are a suite's, and their names tell a size."""
    root = Element("testsuites", name="parbench compare")
    if comparison.counted:
        suite = SubElement(root, "testsuite", name="counts", tests=str(len(comparison.counted)))
        for one, held in comparison.counted:
            told = "; ".join(found.told for found in held.changes if found.fails)
            _add(suite, "counts", one.case.label, "CHANGED" if told else "SAME", told)
        _count(suite)
    if whole := comparison.whole:
        suite = SubElement(root, "testsuite", name="the whole run", tests="1")
        _add(suite, "compare", "the whole run", whole.word, whole_words(comparison))
        _count(suite)
    for family in comparison.families:
        name = cells.visible(f"{family.name} on {world_words(family.series[0].world)}")
        suite = SubElement(root, "testsuite", name=name, tests=str(len(family.series)))
        properties = SubElement(suite, "properties")
        for key, value in _properties(family).items():
            SubElement(properties, "property", name=cells.visible(key), value=cells.visible(value))
        for one in family.series:
            parts = (effect_words(one.effect) if one.effect else "", one.reason)
            case = _add(suite, one.case.name, one.case.label, one.word, ": ".join(filter(None, parts)) or one.word)
            seconds = one.new.value(one.new.headline) if one.new else None
            if seconds is not None:
                case.set("time", f"{seconds:.9f}")
        _count(suite)
    for counts in ("tests", "failures", "errors"):
        root.set(counts, str(sum(int(suite.get(counts, "0")) for suite in root)))
    indent(root)
    return tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add(suite: Element, classname: str, name: str, word: Word, told: str) -> Element:
    case, text = SubElement(suite, "testcase", classname=classname, name=cells.visible(name)), cells.visible(told)
    if tag := VERDICTS[word].junit:
        SubElement(case, tag, type=word, message=text).text = f"{word}: {text}"
    return case


def _count(suite: Element) -> None:
    for counts, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(counts, str(len(suite.findall(f"testcase/{tag}"))))


def _properties(family: Family) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in family.series:
        prefix = "" if one.size is None else f"{cells.size(one.size)} "
        known = asdict(one.effect) if one.effect else {}
        found |= {f"{prefix}{name}": f"{value:.6g}" for name, value in known.items() if value is not None}
        found[f"{prefix}verdict"] = one.word
    around = {change.path: f"{change.base} -> {change.new}" for one in family.series for change in one.changes}
    return found | {f"environment {path}": text for path, text in around.items()}
