"""Prompt economy: the section that pictures and language share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from genrl.config.errors import Finding
from genrl.config.section import Count, Section, Share, Ways


class Replay(Section):
    """Ask prompts again that had good and bad samples (Prompt Replay, arXiv 2603.21177)."""

    share: Share = 0.5
    """Largest share of an iteration's prompts that were asked before; the others are the next of the data."""


class Selection(Section):
    """Choose prompts by what their samples have been worth (MoPPS, arXiv 2507.04632)."""

    by: Literal["success", "spread"]
    """success = rate of samples whose first reward is at least 1 (answers: evaluation.right_at), nearest to one half;
    spread = largest variance of the total reward within the group, for rewards that are not just right or wrong."""
    candidates: Count = 8
    """Prompts looked at for each that is asked (MoPPS on geometry: 8)."""
    replay: Replay | None = None
    """Ask useful prompts again; null = only as the data comes round."""


class Economy(Section):
    """Which prompts are asked, and which of their samples are trained on (docs/economy.md)."""

    selection: Selection | None = None
    """Choose prompts by what their samples have been worth; null = all, equally often."""
    keep: Ways | None = None
    """Train on so many samples of each group, those with the largest variance of the total reward (PODS, arXiv
    2504.13818); null = all."""

    def problems(self, section: str, group: int, prompts: int, staleness: int) -> Iterator[Finding]:
        """Why groups of so many samples cannot be chosen or thinned out so. section: the one that says how many."""
        at, chosen = "economy.selection", self.selection
        if chosen is not None:
            if chosen.replay is not None and chosen.replay.share * prompts < 1:
                text = f"{chosen.replay.share:g} of {prompts} prompts are less than one; use a larger"
                keys = (f"{at}.replay.share", f"{section}.prompts_per_iteration")
                yield keys, f"{text} share or leave replay out"
            if chosen.by == "spread" and group < 2:
                yield (f"{at}.by", f"{section}.group_size"), "one sample has no spread; write 2 or more"
            if staleness:
                text = "prompts are chosen by results of the iteration before, samples are drawn before them; write 0"
                yield (f"{section}.staleness", at), text
        if self.keep is not None and self.keep >= group:
            text = f"a group has {group} samples, so none is left out; write {max(2, group // 2)}, or leave it out"
            yield ("economy.keep", f"{section}.group_size"), text
