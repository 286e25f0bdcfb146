"""An agent of the official `openai` client that asks for JSON, and the sums that it is asked for."""

import json
from typing import Any

from openai import AsyncOpenAI

from envs.arithmetic import Arithmetic

CLIENT = AsyncOpenAI(api_key="each episode has its own")
SCHEMA: Any = {
    "type": "object",
    "properties": {"sum": {"type": "integer", "minimum": 0, "maximum": 18}, "why": {"type": "string", "maxLength": 8}},
    "required": ["sum", "why"],
    "additionalProperties": False,
}


async def solve(base_url: str, api_key: str, task: str) -> str:
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    reply = await client.chat.completions.create(
        model="policy",
        messages=[{"role": "user", "content": task}],
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}},
    )
    # An answer that was cut off is no JSON, and its episode is judged on an empty answer.
    return str(json.loads(reply.choices[0].message.content or "")["sum"])


class Sums(Arithmetic):
    """Sums for a tiny model that can write JSON, but has not learned it."""

    def alphabet(self) -> str:
        return super().alphabet() + '{}": ,sumwhy'
