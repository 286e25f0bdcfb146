"""Agent with the official `openai` client, for examples/agent_openai.toml. Its code does not depend on Flash."""

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="each episode has its own")  # made once, because it takes a tenth of a second


async def solve(base_url: str, api_key: str, task: str) -> str:
    """Send the task to the policy, and return its answer."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task}])
    return reply.choices[0].message.content or ""
