"""Random schedules of prompts that begin alike."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.support.attention_model import VOCABULARY
from tests.support.harness import Job
from tests.support.schedules import Schedule, random_schedule


def sharing_schedule(seed: int, width: int) -> Schedule:
    """A random schedule of prompts that begin alike, in a pool as small as ever."""
    schedule, chooser = random_schedule(seed), random.Random(seed)
    texts = [[chooser.randrange(VOCABULARY) for _ in range(30)] for _ in range(2)]
    jobs = []
    for number, job in enumerate(schedule.jobs):
        length = len(job.prompt)
        same = min(length, chooser.choice([length, length - 1, length // 2]))
        prompt = chooser.choice(texts)[:same] + [token % VOCABULARY for token in job.prompt[same:]]
        jobs.append(Job(prompt, replace(job.params, seed=number)))
        params = jobs[-1].params
        params.termination_id = min(params.termination_id, VOCABULARY - 1)
        params.stop_token_ids = [token % VOCABULARY for token in params.stop_token_ids]
        if chooser.random() < 0.5:
            params.frequency_penalty = 0.9
    schedule.jobs = jobs
    schedule.config["max_tokens"] += schedule.config["max_requests"] * (width - 1)
    return schedule
