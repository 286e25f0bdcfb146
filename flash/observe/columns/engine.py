"""What an engine tells of itself, every two seconds: the page's table of engines, Prometheus and `flash watch` have it.

A number that the engine itself knows is a field of `flash.rollout.engine.Pressure` of the same name; what its node
counts is added in `flash.rollout.reports`.
"""

from __future__ import annotations

from flash.observe.columns.column import Column, ColumnGroup

ENGINE = ColumnGroup(
    "",
    (
        Column("requests", "requests that it holds", form=".0f", label="requests"),
        Column("limit", "requests that it may hold now", form=".0f", label="at most"),
        Column(
            "kv_used",
            "share of its KV cache that is taken",
            "share",
            form=".0%",
            label="KV cache",
            worry="it is full while requests wait",
            helps="raise `engine.memory_fraction` (on CPUs `engine.kv_cache_gib`), add engines, or shorten the answers",
        ),
        Column(
            "preemptions",
            "sequences that it put back for want of KV cache, since its start",
            form=".0f",
            label="preempted",
            worry="it grows all the time: sequences are computed twice",
            helps="as where `kv_used` is full",
        ),
        Column(
            "prefix_hit_share",
            "share of prompt tokens that its prefix cache held, over the last 100 steps that began a request",
            "share",
            form=".0%",
            label="prefix hits",
            worry="it is small though episodes have many turns: each prompt is computed anew",
        ),
        Column(
            "accepted_share",
            "share of drafted tokens that it accepted, over the last 100 steps that had any",
            "share",
            form=".0%",
            label="drafts",
        ),
        Column(
            "tokens_per_second", "response tokens that came from it since its last report", "tokens/s", label="tokens/s"
        ),
        Column("load_s", "time that its last swap of weights took", "s", form=".2g", label="swap s"),
    ),
)
