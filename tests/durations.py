"""Seconds and cases of each file of tests, the dearest first. CI keeps the report."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from itertools import chain
from xml.etree import ElementTree as ET


def main(*reports: str) -> None:
    """Print a line for each file in the reports of `pytest --junitxml`."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    cases = chain.from_iterable(ET.parse(report).iter("testcase") for report in reports)  # noqa: S314 - our own
    for case in cases:
        seconds[re.sub(r"\.[A-Z]\w*", "", case.attrib["classname"])].append(float(case.attrib["time"]))
    seconds["all files"] = list(chain(*seconds.values()))
    for file, spent in sorted(seconds.items(), key=lambda each: -sum(each[1])):
        sys.stdout.write(f"{sum(spent):9.1f} s {len(spent):6} cases  {file}\n")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["runs/durations.xml"]))
