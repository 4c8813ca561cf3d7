"""The process that reads and compares mathematical answers by math-verify, a line of JSON for each: started as a script
by `mathematics`, which ends it where an answer takes too long. math-verify's own timeouts work in main threads only.

    {"truth": "$0.5$"}                                   ->  true       it is an expression or a number, as a whole
    {"truth": "$0.5$", "written": "$\\\\frac{1}{2}$"}    ->  true       they are equal
"""

import json
import logging
import re
import sys

from math_verify import parse, verify

_SAID = re.compile(r"\\[A-Za-z]+|\d|[A-Za-z]")


def read(formula: str) -> list[object]:
    """What a formula of `mathematics.written` may mean, the most probable first; nothing where it cannot be read."""
    parsed: list[object] = parse(formula, parsing_timeout=None)
    return parsed


def is_whole(formula: str, parsed: list[object]) -> bool:
    """Whether no digit and no variable of a formula is missing in what was taken of it, the last of `parsed`."""

    def said(text: str) -> list[str]:
        halves = re.sub(r"(?<!\d)0?\.5(?!\d)", r"\\frac{1}{2}", text)  # math-verify writes it so
        return sorted(sign for sign in _SAID.findall(halves) if len(sign) == 1)

    return bool(parsed) and (not isinstance(parsed[-1], str) or said(formula) == said(parsed[-1].replace(" and ", " ")))


def main() -> None:
    logging.disable(logging.WARNING)  # that there is no timeout
    print("true", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        truth = read(request["truth"])
        written = request.get("written")
        answer = (
            is_whole(request["truth"], truth) if written is None else verify(truth, read(written), timeout_seconds=None)
        )
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
