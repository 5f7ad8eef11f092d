"""Write the table of options in `docs/configuration.md` from `CheckpointerConfig`.

    python tools/options.py            # writes the table
    python tools/options.py --check    # fails where it is not up to date

The text of each option is that of the docstring, its default that of the field.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path

from pydantic_core import PydanticUndefined

from penstock.core.config.model import CheckpointerConfig
from penstock.core.units import size_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
BEGIN, END = "<!-- options: written by tools/options.py -->", "<!-- end of options -->"


def table() -> str:
    """Return a row for each field of the model, in its order."""
    attributes = inspect.getdoc(CheckpointerConfig).partition("Attributes:\n")[2]  # type: ignore[union-attr]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE))
    lines = ["| key | default | |", "|---|---|---|"]
    for name, field in CheckpointerConfig.model_fields.items():
        lines.append(f"| `{name}` | {_shown(field.default)} | {' '.join(texts[name].split())} |")
    return "\n".join(lines)


def _shown(default: object) -> str:
    if default is PydanticUndefined or default is None or default == ():
        return ""
    if type(default) is int:
        return size_text(default).replace(".0 ", " ")
    return f"{default:g}" if isinstance(default, float) else f"`{json.dumps(default)}`"


def main() -> None:
    """Write the table, or compare it with the one that is there."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    wanted = f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"
    if wanted == page:
        print(f"{len(CheckpointerConfig.model_fields)} options, as the page shows them")
    elif "--check" in sys.argv:
        sys.exit(f"{PAGE} is not up to date. Run: python tools/options.py")
    else:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
