"""Verifier that lets a served model grade answers: `verifier = "judge:judge"` in the options of a data set.

`JUDGE_URL` is the base URL of a server with the OpenAI API, such as `vllm serve MODEL` on a GPU that the run leaves
free. `JUDGE_MODEL` is the name of its model, and `JUDGE_KEY` its key. The column `answer` describes a good answer. If
the judge fails or returns no grade, the error is retried and never becomes a reward of 0. Give the judge enough time:
`timeout = 120`.
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
    """Return the grade that the judge gives, from 0 to 1."""
    asked = {
        "model": os.environ["JUDGE_MODEL"],
        "messages": [{"role": "user", "content": QUESTION.format(wanted=answer, answer=completion)}],
        "temperature": 0,
        "max_tokens": 8,
    }
    key = {"Authorization": f"Bearer {os.environ['JUDGE_KEY']}"} if "JUDGE_KEY" in os.environ else {}
    async with httpx.AsyncClient(timeout=None) as client:  # the environment's own deadline ends the request
        reply = await client.post(f"{os.environ['JUDGE_URL']}/chat/completions", json=asked, headers=key)
    said = reply.raise_for_status().json()["choices"][0]["message"]["content"]
    if (grade := re.search(r"\b(10|\d)\b", said)) is None:
        raise ValueError(f"the judge says no grade: {said!r}")
    return int(grade[1]) / 10
