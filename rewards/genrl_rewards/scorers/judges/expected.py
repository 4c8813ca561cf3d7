"""Questions with their expected answers, as a row of a prompt file has them; without torch, for `check` reads them."""

from __future__ import annotations

from typing import Any

COLUMN = "vqa_list"  # GenEval 2's


def pairs(row: Any) -> list[tuple[str, str]]:
    """The questions of a row and the answers expected, which are yes where a question stands alone.

    Raises ValueError for an entry of another form, and for an answer that is no single word.
    """
    if not isinstance(row, list | tuple | None):
        raise ValueError(f"questions are a list, found {row!r:.60}")
    pairs_of_row = [_pair(entry) for entry in row or ()]
    for question, answer in pairs_of_row:
        if len(answer.split()) != 1:
            raise ValueError(
                f"the answer {answer!r} to {question!r:.80} is compared with the first word that a model says; expect "
                "one word, or ask for each word of it"
            )
    return pairs_of_row


def _pair(entry: Any) -> tuple[str, str]:
    if isinstance(entry, str):
        return entry, "yes"
    if not isinstance(entry, list | tuple) or len(entry) != 2 or not isinstance(entry[0], str):
        raise ValueError(f"a question is text, or a pair of text and answer, found {entry!r:.80}")
    return entry[0], str(entry[1])
