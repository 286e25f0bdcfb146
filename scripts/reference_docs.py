"""Write what of docs/ is made from the code: `make docs`.

The configuration's page from its tree, that of the commands from the parsers, the tables of the metrics' page from the
table of columns, and Grafana's dashboard from the charts.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from flash.cli.main import command_reference
from flash.config.reference import markdown
from flash.observe.columns.page import page
from flash.view.prometheus import dashboard

DOCS = Path(__file__).resolve().parent.parent / "docs"

if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(markdown(), encoding="utf-8")
    (DOCS / "commands.md").write_text(command_reference(), encoding="utf-8")
    metrics = DOCS / "metrics.md"
    metrics.write_text(page(metrics.read_text(encoding="utf-8")), encoding="utf-8")
    (DOCS / "grafana.json").write_bytes(msgspec.json.format(msgspec.json.encode(dashboard())) + b"\n")
