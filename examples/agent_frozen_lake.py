"""Agent that walks over a frozen lake with the official `openai` client, for examples/agent_frozen_lake.toml.

The task contains the lake. The agent shows the policy the lake, requests one move, makes the move, and repeats that.
Its answer is the sequence of all moves.
"""

from openai import AsyncOpenAI

CLIENT = AsyncOpenAI(api_key="each episode has its own")  # made once, because it takes a tenth of a second
STEPS = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
MOST_STEPS = 6


async def solve(base_url: str, api_key: str, task: str) -> str:
    """Walk over the lake of the task with the policy's moves, and return all moves."""
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    lake = dict(enumerate(map(list, task.split())))
    row, column = next((row, line.index("P")) for row, line in lake.items() if "P" in line)
    lake[row][column] = "."
    messages, walked = [], ""
    for _ in range(MOST_STEPS):
        shown = "".join("".join(line) + "\n" for line in lake.values())
        place = row * (len(lake) + 1) + column
        messages.append({"role": "user", "content": f"{shown[:place]}P{shown[place + 1 :]}"})
        reply = await client.chat.completions.create(model="policy", messages=messages)
        said = (reply.choices[0].message.content or "").strip()
        messages.append({"role": "assistant", "content": said})
        if said in STEPS:
            walked += said
            down, right = STEPS[said]
            row = min(max(row + down, 0), len(lake) - 1)
            column = min(max(column + right, 0), len(lake) - 1)
        if lake[row][column] in "GO":
            break
    return walked
