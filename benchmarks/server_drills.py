"""Drills of reward servers, ours and broken ones; part of `benchmarks.drills`."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import torch

import genrl_rewards
from benchmarks.drill import Row
from genrl_rewards.service.remote import Outage, Remote
from tests import servers
from tests.rewards import plain_rewards
from tests.rewards.faults import FAULTS
from tests.rewards.service.test_load import POST, TOKEN, assert_served, opened
from tests.rewards.service.test_serve import mutations, post

IMAGES = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))


def broken_servers(_: int, __: random.Random) -> Iterator[Row]:
    """Every fault by every outage policy: no score is made up, and training stops or goes on, as it is told."""
    notes = []
    for name, fault in FAULTS.items():
        for policy in ("stop", "drop"):
            outage = Outage(timeout_s=0.08, deadline_s=0.3, policy=policy)  # type: ignore[arg-type]
            with servers.scripted(fault.reply) as url:
                reward = Remote(url, "mine")
                reward.outage = outage  # from here on: it may take longer to say hello on a busy machine
                scores = genrl_rewards.score(reward, images=IMAGES, prompts=["a", "b"], name="mine")
            fatal = [failure.fatal for failure in scores.failures]
            wanted = {"outage": [] if policy == "drop" else [True], "failure": [False], "no score": []}
            if not all(map(math.isnan, scores.values)) or fatal != wanted[fault.meaning]:
                notes.append(f"{name}, {policy}: {scores.values}, {fatal}")
    tries = 2 * len(FAULTS)
    yield Row(f"{len(FAULTS)} server faults by both policies", tries, tries - len(notes), "those scores", tuple(notes))


def mutated_bodies(tries: int, _: random.Random) -> Iterator[Row]:
    """Requests with bytes flipped, cut, swapped, and wrong types: each is refused, and the next is served."""
    requests, notes = mutations(1), list[str]()
    with servers.live(plain_rewards.mean) as url, httpx.Client(base_url=url, trust_env=False) as client:
        for number in range(tries):
            kind, body = next(requests)
            reply = post(client, body, kind)
            if "Traceback" in reply.text or (reply.status_code == 500 and "raised" not in reply.text):
                notes.append(f"request {number}: status {reply.status_code}")
        scores = genrl_rewards.score(Remote(url), images=IMAGES, prompts=["a", "b"])
        served = scores == genrl_rewards.score(plain_rewards.mean, images=IMAGES, prompts=["a", "b"])
    yield Row("mutated requests", tries, (tries - len(notes)) * served, "nothing", tuple(notes))


def slow_strangers(_: int, __: random.Random) -> Iterator[Row]:
    """Half-open connections, headers that never end, bodies that never come: an authorised client is served beside."""
    crowds = {"70 half headers": (b"POST /sco", 70), "200 silent": (b"", 200), "4 bodies": (POST + TOKEN + b"\r\n{", 4)}
    notes = []
    for name, (text, count) in crowds.items():
        with servers.live(plain_rewards.mean, token="right") as url, ExitStack() as stack:
            opened(stack, url, text, count)
            time.sleep(0.2)
            try:
                assert_served(url)
            except AssertionError:
                notes.append(name)
    yield Row("slow strangers at the server", len(crowds), len(crowds) - len(notes), "nothing", tuple(notes))
