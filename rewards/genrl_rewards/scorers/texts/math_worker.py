"""The process that reads and compares mathematical answers by math-verify, a line of JSON for each: started as a script
by `mathematics`, which ends it where an answer takes too long. math-verify's own timeouts work in main threads only.

    {"truth": "0.5"}                                 ->  true       it is an expression or a number
    {"truth": "0.5", "written": "\\\\frac{1}{2}"}    ->  true       they are equal
"""

import json
import logging
import re
import sys

from math_verify import parse, verify

_DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed")
_FORMULA = re.compile(r"[\\^{(\[]")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")


def delimited(text: str) -> str:
    """A formula between dollars, without which math-verify takes little LaTeX; other texts as they are."""
    if _DELIMITED.search(text) or not _FORMULA.search(text) or _WORD.search(text):
        return text
    return f"${text}$"


def read(text: str) -> list[object]:
    """What a text may mean, the most probable first; nothing where it holds neither a number nor a formula."""
    found: list[object] = parse(delimited(text), parsing_timeout=None)
    return found


def main() -> None:
    logging.disable(logging.WARNING)  # that there is no timeout
    print("true", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        truth = read(asked["truth"])
        written = asked.get("written")
        answer = bool(truth) if written is None else verify(truth, read(written), timeout_seconds=None)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
