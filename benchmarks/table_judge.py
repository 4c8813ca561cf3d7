"""How often a judge that was taught the table agrees with the rule about which of two held-out pictures is nearer.

    python -m benchmarks.table_judge runs/table_judge/model [--pairs 500]

Asked as RL-VLM-F asks, in both orders and two stages (`preference_judge`); a pair counts where both orders agree and
the rule sees a difference of more than its margin, .05. Writes table_judge.json: pairs, the share in which the orders
agree, and in which, where they do, the rule agrees, in all and by how much the rule sees the pictures differ.
"""

from __future__ import annotations

import numpy as np

import genrl_rewards
from benchmarks.common import parser, save
from genrl.playground.tasks.tables import ANSWER, COMPARE, Nearer
from genrl_rewards.scorers.objects.tabletop import progress

MARGIN = 0.05
APART = (0.05, 0.2, 0.5, 1.0, 4.0)
"""Bounds of the differences by the rule, in half table widths."""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("model", help="folder of the judge")
    made.add_argument("--pairs", type=int, default=500, help="held-out pairs; default: 500")
    given = made.parse_args()
    asked = {"compare": COMPARE, "answer": ANSWER, "dtype": "float32", "max_tokens": 12}
    judge = genrl_rewards.load("preference_judge", {"model": given.model, **asked})
    task, rows = Nearer("eval"), []
    for number in range(given.pairs):
        first, second, text = task[2 * number].parts
        line = str(text).partition(" list ")[0]
        rule = [progress(np.asarray(picture), line) for picture in (first, second)]
        one, other = judge([first, second], [line] * 2, [(0, 1), (1, 0)])
        rows.append((rule[0] - rule[1], one - other))
    apart = [(abs(by_rule), by_rule > 0, said) for by_rule, said in rows if abs(by_rule) > MARGIN]
    sure = [row for row in apart if abs(row[2]) == 1]
    results = {"pairs": len(apart), "orders_agree": len(sure) / len(apart), "agrees": agreement(sure)}
    for low, high in zip(APART, APART[1:], strict=False):
        results[f"agrees/{low}-{high}"] = agreement([row for row in sure if low < row[0] <= high])
    print(results)
    save(given.out, "table_judge", results)


def agreement(rows: list[tuple[float, bool, float]]) -> float | None:
    """The share of pairs in which the judge prefers what the rule prefers; None where there are none."""
    return sum((said > 0) == better for _, better, said in rows) / len(rows) if rows else None


if __name__ == "__main__":
    main()
