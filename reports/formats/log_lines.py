"""The lines of a log without the prefixes of launchers and log collectors."""

import json
import re

_PREFIXES = tuple(
    re.compile(rf"\s*(?:{pattern})")
    for pattern in (
        r"\[[\w@.-]+,\d+\](?:\[[^\]]*\])?<std\w+>:",  # mpirun --tag-output
        r"\w{3} \w{3} +\d+ \d\d:\d\d:\d\d \d{4}<std\w+>:",  # mpirun --timestamp-output
        r"\d+:\s",  # srun --label
        r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d)?\]?:?\s",
        r"\w{3} +\d+ \d\d:\d\d:\d\d [\w.-]+ [\w./-]+(?:\[\d+\])?:\s",  # syslog
        r"\d\d:\d\d:\d\d(?:[.,]\d+)?\s",
        r"std(?:out|err) [FP]\s",  # the container runtime of Kubernetes
        r"\[[^\]#]*\]:?",  # kubectl logs --prefix, mpiexec -prepend-rank, log levels
        r"\([^)#]*\)\s",  # Ray
        r"[\w./-]+\s+\|\s",  # docker compose
        r"[A-Za-z][\w./:-]*:\s",  # pdsh, Python logging
        r"(?:DEBUG|INFO|WARN|WARNING|ERROR)\s",
    )
)
"""The prefixes that launchers and log collectors write before each line of a program."""
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PREFIXED_HEADING = re.compile(
    r"^(.*?[^\s#].*?)#\s+(?:size\s|Size\s|OSU |nThread |nccl-tests |Using devices)"
)
"""A heading of a supported tool after a prefix of any form, which is the first group."""
_MESSAGE_KEYS = ("log", "message", "msg", "textPayload")
"""The keys under which log collectors store a line of a program in JSON."""


def read_log_lines(text: str) -> list[str]:
    """Return the lines of a log without prefixes such as ``[1,0]<stdout>:``.

    A prefix of unknown form is recognized before the heading of a table, and is then removed from
    each line that starts with the same form. The number of lines does not change, so that messages
    can name a line.
    """
    lines = [_ANSI.sub("", _unwrap_json(line)).rstrip() for line in text.splitlines()]
    stripped = [_strip_known_prefixes(line) for line in lines]
    form = _find_unknown_form(stripped)
    if form is None:
        return stripped
    return [form.sub("", line, count=1) for line in stripped]


def _unwrap_json(line: str) -> str:
    """Return the message of a line that a container runtime wrote as a JSON object.

    Other lines are returned as they are.
    """
    if not line.startswith("{") or not line.endswith("}"):
        return line
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    messages = [entry[key] for key in _MESSAGE_KEYS if isinstance(entry.get(key), str)]
    return messages[0] if messages else line


def _strip_known_prefixes(line: str) -> str:
    """Return a line without the prefixes of launchers and log collectors in ``_PREFIXES``.

    The text from a ``#`` on is not changed, because it is a comment of the program.
    """
    while not line.lstrip().startswith("#"):
        for prefix in _PREFIXES:
            match = prefix.match(line)
            if match:
                line = line[match.end() :]
                break
        else:
            return line
    return line.lstrip()


def _find_unknown_form(lines: list[str]) -> re.Pattern[str] | None:
    """Return a pattern for prefixes of unknown form: it matches the prefix of a table's heading.

    None if no heading has a prefix. In the pattern, words of the prefix may vary, other characters
    may not.
    """
    for line in lines:
        match = _PREFIXED_HEADING.match(line)
        if match:
            prefix = match[1].strip()
            parts = map(_generalize, re.split(r"(\w+|\s+)", prefix))
            border = r"(?:\s|$)" if re.search(r"\w$", prefix) else r"\s?"
            return re.compile(r"^\s*" + "".join(parts) + border)
    return None


def _generalize(part: str) -> str:
    """Return a pattern for one part of a prefix.

    For a word it matches any word, for space any space, otherwise only the same characters.
    """
    if part.isspace():
        return r"\s+"
    return r"\w+" if re.fullmatch(r"\w+", part) else re.escape(part)
