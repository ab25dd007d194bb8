#!/usr/bin/env python3
"""A header of include/sf that changes is another ABI: it needs another SF_ABI_MINOR. expected/interfaces.txt has a hash of each header without comments, and
the number that it had.

    tests/abi/interfaces.py                          compares
    SF_UPDATE_GOLDEN=1 tests/abi/interfaces.py       writes the new hashes; refuses to when headers changed and the number did not rise
"""
import hashlib
import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HEADERS = ROOT / "sdk" / "include" / "sf"
EXPECTED = ROOT / "tests" / "abi" / "expected" / "interfaces.txt"
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|//[^\n]*|/\*.*?\*/', re.S)
NUMBERS = re.compile(r'^#define (SF_ABI_MAJOR|SF_ABI_MINOR|SF_SDK_VERSION) +"?([0-9.]+)"?$', re.M)


def interface(text):
    """The text without comments, white space and the version's own lines."""
    text = TOKEN.sub(lambda found: " " if found[0].startswith("/") else found[0], NUMBERS.sub("", text))
    return re.sub(r"\s+", " ", re.sub(r"\\\n", " ", text)).strip()


def record(folder):
    numbers = dict(NUMBERS.findall((folder / "plugin.h").read_text()))
    lines = ["# include/sf without comments: tests/abi/interfaces.py", f"abi {numbers['SF_ABI_MAJOR']}.{numbers['SF_ABI_MINOR']}", f"sdk {numbers['SF_SDK_VERSION']}"]
    for path in sorted(folder.iterdir()):
        lines.append(f"{hashlib.sha256(interface(path.read_text()).encode()).hexdigest()[:16]} {path.name}")
    return "\n".join(lines) + "\n"


def number_of(text):
    major, minor = re.search(r"^abi (\d+)\.(\d+)$", text, re.M).groups()
    return int(major), int(minor)


def problem(found, expected):
    """Why `found` may not stand for `expected`; empty when it is the same."""
    if found == expected:
        return ""
    known = dict(line.split()[::-1] for line in expected.splitlines() if re.match(r"[0-9a-f]{16} ", line))
    now = dict(line.split()[::-1] for line in found.splitlines() if re.match(r"[0-9a-f]{16} ", line))
    changed = sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))
    if changed and number_of(found) <= number_of(expected):
        return (f"{', '.join('sf/' + name for name in changed)} changed, and the ABI's number is still {'.'.join(map(str, number_of(found)))}: a plugin that was built "
                "before would be opened and crash\n  fix: raise SF_ABI_MINOR in sdk/include/sf/plugin.h, say in CHANGELOG.md under ABI what changed, "
                "and run SF_UPDATE_GOLDEN=1 tests/abi/interfaces.py")
    return "tests/abi/expected/interfaces.txt is not what the headers say now\n  fix: SF_UPDATE_GOLDEN=1 tests/abi/interfaces.py"


def self_test():
    """That the comparison can fail, and on what."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for path in HEADERS.iterdir():
            (folder / path.name).write_text(path.read_text())
        before = record(folder)

        def edit(file, old, new):
            text = (folder / file).read_text()
            assert old in text, (file, old)
            (folder / file).write_text(text.replace(old, new, 1))

        edit("tracker.h", "/* One figure.", "/* A figure, one of many.")
        edit("unit.hpp", "enum class Phase { forward,", "enum class Phase {\n  forward,  // first\n ")
        assert problem(record(folder), before) == "", "comments and line ends are no interface"
        edit("tracker.h", "double value;", "float value;")
        assert "sf/tracker.h changed, and the ABI's number is still" in problem(record(folder), before)
        major, minor = number_of(before)
        edit("plugin.h", f"#define SF_ABI_MINOR {minor}", f"#define SF_ABI_MINOR {minor + 1}")
        assert "is not what the headers say now" in problem(record(folder), before), "with a new number only the record is old"
        (folder / "new.hpp").write_text("#pragma once\n")
        assert "is not what the headers say now" in problem(record(folder), before)


def main():
    self_test()
    found, expected = record(HEADERS), EXPECTED.read_text() if EXPECTED.exists() else "abi 0.0\n"
    why = problem(found, expected)
    if why and "SF_UPDATE_GOLDEN" in os.environ and "number is still" not in why:
        EXPECTED.write_text(found)
        why = ""
    changes = (ROOT / "CHANGELOG.md").read_text()
    version = re.search(r"^sdk ([0-9.]+)$", found, re.M)[1]
    if not why and f"\n## {version}" not in changes:
        why = f"CHANGELOG.md has no part \"## {version}\""
    if why:
        print(f"error: {why}", file=sys.stderr)
        return 1
    print(f"{found.count(chr(10)) - 3} headers, ABI {'.'.join(map(str, number_of(found)))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
