"""A served model as the judge of answers: `verifier = "judge:judge"` in the options of a data set.

`JUDGE_URL` and `JUDGE_MODEL` name a server of the OpenAI API, such as `vllm serve MODEL` on a GPU that the run leaves
free, and its model; `JUDGE_KEY` is its key. The column `answer` holds what a good answer must have. A judge that fails
or says no grade is an error that is tried again, never a reward of 0; give it time: `timeout = 120`.
"""

from __future__ import annotations

import os
import re

import httpx

QUESTION = """\
Grade an answer from 0 (useless) to 10 (it has all that is asked for). Say the number alone.

What is asked for:
{wanted}

The answer:
{answer}"""


async def judge(completion: str, answer: str) -> float:
    """The grade, from 0 to 1."""
    asked = {
        "model": os.environ["JUDGE_MODEL"],
        "messages": [{"role": "user", "content": QUESTION.format(wanted=answer, answer=completion)}],
        "temperature": 0,
        "max_tokens": 8,
    }
    key = {"Authorization": f"Bearer {os.environ['JUDGE_KEY']}"} if "JUDGE_KEY" in os.environ else {}
    async with httpx.AsyncClient(timeout=None) as client:  # the environment's own deadline ends it
        reply = await client.post(f"{os.environ['JUDGE_URL']}/chat/completions", json=asked, headers=key)
    said = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    if (grade := re.search(r"\b(10|\d)\b", said)) is None:
        raise ValueError(f"the judge says no grade: {said!r}")
    return int(grade[1]) / 10
