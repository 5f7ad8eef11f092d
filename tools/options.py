"""Write the table of options in `docs/configuration.md` from `CheckpointerConfig`.

python tools/options.py            # writes the table
python tools/options.py --check    # fails where it is not up to date
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


def shown(default: object) -> str:
    """Return a default as text."""
    if default is PydanticUndefined or default is None or default == ():
        return ""
    if type(default) is int:
        return size_text(default).replace(".0 ", " ")
    return f"{default:g}" if isinstance(default, float) else f"`{json.dumps(default)}`"


def main() -> None:
    """Write the table, or compare it with the one that is there."""
    attributes = (inspect.getdoc(CheckpointerConfig) or "").partition("Attributes:\n")[2]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", attributes, re.MULTILINE))
    table = "| key | default | |\n|---|---|---|\n"
    for name, field in CheckpointerConfig.model_fields.items():
        table += f"| `{name}` | {shown(field.default)} | {' '.join(texts[name].split())} |\n"
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    wanted = f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}"
    if "--check" not in sys.argv:
        PAGE.write_text(wanted)
    elif wanted != page:
        sys.exit(f"{PAGE} is not up to date. Run: python tools/options.py")


if __name__ == "__main__":
    main()
